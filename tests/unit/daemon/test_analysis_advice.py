"""Advice: each rule on a trace made for it, with the saving worked out by hand, and what is not said."""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon import traces

from torchperfd.document.terminal import render
from torchperfd.model.formatting import ns_text
from torchperfd.model.loader_facts import UNMEASURED_COST, LoaderFacts
from torchperfd.model.loader_workers import advise_loader
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import rules
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.edits import Edit
from torchperfd_daemon.analysis.advice.recording import (
    AFTER_NS,
    DISPATCH_NS,
    EVENT_NS,
    FRAME_NS,
    MEMORY_NS,
    OUTERMOST_NS,
    SHAPES_NS,
)
from torchperfd_daemon.analysis.advice.rules import MIN_NS, MIN_SHARE, Advice, Finding, gather, weigh

US, MS = 1_000, 1_000_000


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the traces of these tests be as short as what they show; `test_advice_conditions` has the floor."""
    monkeypatch.setattr(rules, "MIN_RECORDED_NS", 0)


def annotation(name: str, start: int, end: int, **more: Any) -> str:
    return traces.event(name, start, end, cat="user_annotation", **more)


def kernel(name: str, start: int, end: int, *, cat: str = "kernel", **args: Any) -> str:
    return traces.event(name, start, end, cat=cat, thread=7, args=args)


def step(number: int, start: int, end: int) -> str:
    return annotation(f"ProfilerStep#{number}", start, end)


def advice_on(events: Sequence[str]) -> dict[str, Advice]:
    return {each.rule: each for each in analysis.summarise(traces.trace_of(events)).advice}


def alone(events: Sequence[str]) -> Advice:
    (advice,) = advice_on(events).values()
    return advice


def draw(iterator: str, start: int, end: int) -> str:
    return annotation(f"enumerate(DataLoader)#{iterator}.__next__", start, end)


def test_batches_made_in_the_step_want_workers() -> None:
    events = []
    for number in range(4):
        at = number * 40 * MS
        events += [step(number, at, at + 40 * MS), draw("_SingleProcessDataLoaderIter", at, at + 30 * MS)]
    advice = alone(events)
    assert advice.rule == "loader-workers"
    # 30 ms of waiting beside 10 ms of the rest: three workers keep up, one more evens them out.
    assert "num_workers=4" in advice.setting
    # Less what it takes to receive a batch from a worker.
    saved = 30 * MS - UNMEASURED_COST.receiving(2, 0) * 1e9
    assert advice.saves_ns_per_step == pytest.approx(saved, rel=1e-3)
    assert advice.share_of_step == pytest.approx(saved / (40 * MS), rel=1e-3)
    assert "30 ms of each step of 40 ms (75%)" in advice.evidence


def test_workers_that_are_too_slow_can_at_best_be_doubled() -> None:
    events = [step(1, 0, 40 * MS), draw("_MultiProcessingDataLoaderIter", 0, 30 * MS)]
    advice = alone(events)
    assert advice.saves_ns_per_step == pytest.approx(20 * MS, rel=1e-3)
    assert "2 * num_workers" in advice.setting
    assert advice_on([step(1, 0, 12 * MS), draw("_MultiProcessingDataLoaderIter", 0, MS)]) == {}


UNRECORDED: dict[str, Any] = {
    "unrecorded_step_ns": 570_000,
    "unrecorded_phase_ns": {"data": 190_000, "forward": 380_000},
}
LOADER: dict[str, Any] = {
    "workers": 0,
    "cpus": 2.0,
    "draw_cpu": 1.0,
    "rest_cpus": 1.0,
    "batch_tensors": 2,
    "batch_size": 32,
}


def in_process(step_ns: int, draw_ns: int) -> list[str]:
    events = []
    for at in range(0, 4 * step_ns, step_ns):
        events += [
            step(at // step_ns, at, at + step_ns),
            draw("_SingleProcessDataLoaderIter", at, at + draw_ns),
        ]
    return events


def loading_advice(events: Sequence[str], facts: Any) -> Advice | None:
    summary = analysis.summarise(traces.trace_of(events, torchperfd=facts))
    return next((each for each in summary.advice if each.rule == "loader-workers"), None)


def test_loader_advice_inflated_recording_promises_nothing() -> None:
    """Recorded with stacks a draw takes 1.5 ms of 2 ms; nothing recorded it was 0.19 ms of 0.57 ms."""
    inflated = in_process(2 * MS, 1500 * US)
    assert loading_advice(inflated, UNRECORDED | {"loader": LOADER}) is None
    assert loading_advice(inflated, UNRECORDED) is None


def test_loader_advice_is_the_rules_with_the_clients_facts() -> None:
    unrecorded = {"unrecorded_step_ns": 170 * MS, "unrecorded_phase_ns": {"data": 150 * MS}}
    facts = LOADER | {"draw_cpu": 0.04}
    found = loading_advice(in_process(200 * MS, 170 * MS), unrecorded | {"loader": facts})
    expected = advise_loader(LoaderFacts(**facts), 0.17, 0.15)
    assert found is not None
    assert expected is not None
    assert found.setting == expected.setting
    assert found.saves_ns_per_step == pytest.approx(expected.saves_seconds * 1e9)
    assert expected.assumes in found.evidence


def test_advice_never_saves_more_than_the_unrecorded_phase() -> None:
    events = adam("AdamW", 70, 5 * US)
    unlimited = advice_on(events)["fused-optimizer"].saves_ns_per_step
    facts = {"unrecorded_step_ns": MS, "unrecorded_phase_ns": {"optimizer": unlimited / 2}}
    summary = analysis.summarise(traces.trace_of(events, torchperfd=facts))
    assert unlimited > 2 * MIN_NS
    assert [each.saves_ns_per_step for each in summary.advice] == [unlimited / 2]


def test_loader_advice_unknown_workers_of_a_client_get_none() -> None:
    """The newest sampled draw was of a loader without workers: how many this one has is not known."""
    events = [step(1, 0, 40 * MS), draw("_MultiProcessingDataLoaderIter", 0, 30 * MS)]
    assert loading_advice(events, UNRECORDED | {"loader": LOADER}) is None
    assert loading_advice(events, {"unrecorded_step_ns": 40 * MS}) is not None


@pytest.mark.parametrize("loader", [7, [], {"workers": -1}, {"cpus": "two"}, {"batch_bytes": 1e300}, None])
def test_loader_facts_of_another_type_cost_only_themselves(loader: Any) -> None:
    trace = traces.trace_of([step(1, 0, MS)], torchperfd=UNRECORDED | {"loader": loader})
    assert trace.loader is None
    assert trace.unrecorded_step_ns == 570_000


@pytest.mark.parametrize("phases", [7, [], {"data": "long"}, {"data": None}, {"data": -1}, None])
def test_unrecorded_phases_of_another_type_cost_only_themselves(phases: Any) -> None:
    facts = {"unrecorded_step_ns": 9, "unrecorded_phase_ns": phases}
    trace = traces.trace_of([step(1, 0, MS)], torchperfd=facts)
    assert (trace.unrecorded_step_ns, trace.unrecorded_phase_ns) == (9, {})


def test_what_is_outside_the_steps_is_not_looked_at() -> None:
    events = [draw("_SingleProcessDataLoaderIter", 0, 30 * MS), step(1, 30 * MS, 40 * MS)]
    assert advice_on(events) == {}
    assert advice_on([draw("_SingleProcessDataLoaderIter", 0, 30 * MS)]) == {}


def doubles(dtype: str, dims: str) -> list[str]:
    args = {"Input type": [dtype, "double"], "Input Dims": [json.loads(dims), []]}
    return [
        step(1, 0, 10 * MS),
        traces.event("aten::linear", 0, 9 * MS, args=args),
        traces.event("aten::addmm", 1 * MS, 8 * MS, args=args),
    ]


def test_double_precision_costs_half_of_its_work() -> None:
    advice = alone(doubles("double", "[64, 64]"))
    assert advice.rule == "float64"
    assert "2 operators a step" in advice.evidence
    work = 9 * MS - 2 * DISPATCH_NS - EVENT_NS - SHAPES_NS
    assert advice.saves_ns_per_step == pytest.approx(work / 2)


@pytest.mark.parametrize(
    ("name", "left"),
    [("aten::_slow_conv2d_forward", 1 / 3), ("aten::slow_conv3d_forward", 1 / 3), ("aten::mm", 1 / 2)],
)
def test_double_convolutions_cost_two_thirds_on_the_cpu(name: str, left: float) -> None:
    args = {"Input type": ["double"], "Input Dims": [[8, 64, 16, 16]]}
    advice = alone([step(1, 0, 10 * MS), traces.event(name, 0, 9 * MS, args=args)])
    assert advice.saves_ns_per_step == pytest.approx((9 * MS - DISPATCH_NS) * (1 - left))


@pytest.mark.parametrize(("dtype", "dims"), [("float", "[64, 64]"), ("double", "[]"), ("float", "[]")])
def test_numbers_that_are_no_tensors_are_always_doubles(dtype: str, dims: str) -> None:
    assert advice_on(doubles(dtype, dims)) == {}


def adam(name: str, operators: int, length: int) -> list[str]:
    """One step of 1 ms, in which an optimizer runs operators, each followed by 5 µs of Python."""
    events = [step(1, 0, MS), annotation(f"Optimizer.step#{name}.step", 0, operators * (length + 5 * US))]
    return events + [
        traces.event(
            f"aten::{'addcdiv_' if at % 7 == 6 else at % 7}",
            at * (length + 5 * US),
            at * (length + 5 * US) + length,
        )
        for at in range(operators)
    ]


def test_an_update_of_one_parameter_after_the_other_is_fused() -> None:
    advice = alone(adam("AdamW", 70, 4 * US))
    assert advice.rule == "fused-optimizer"
    assert advice.setting == "torch.optim.AdamW(..., fused=True)"
    # All of each operator's 4 µs is saved but for one pass, 1.4 times each seventh; and Python between.
    between = 69 * (5 * US - EVENT_NS - OUTERMOST_NS)
    assert advice.saves_ns_per_step == pytest.approx(70 * 4 * US - 1.4 * 10 * 4 * US + between)


@pytest.mark.parametrize("name", ["RMSprop", "LBFGS", ""])
def test_optimizers_without_fused_cpu_update_are_left_alone(name: str) -> None:
    assert "fused-optimizer" not in advice_on(adam(name, 70, 4 * US))


def test_a_fused_update_is_left_alone() -> None:
    events = [
        annotation("Optimizer.step#AdamW.step", 0, 950 * US),
        traces.event("aten::_fused_adamw_", 900 * US, 901 * US),
    ]
    assert "fused-optimizer" in advice_on(adam("AdamW", 70, 4 * US))
    assert advice_on([*adam("AdamW", 70, 4 * US), *events]) == {}


def zeroed(adds: int, *, refilled: int = 4, shape: str = "[[9, 9]]", again: str = "[[9, 9]]") -> list[str]:
    """Four gradients are filled in 1 ms each and added to in as much; backward fills some before."""
    args, others = ({"Input Dims": json.loads(each)} for each in (shape, again))
    events = [step(1, 0, 60 * MS), annotation("Optimizer.zero_grad#SGD.zero_grad", 0, 5 * MS)]
    events += [traces.event("aten::zero_", at * MS, (at + 1) * MS, args=args) for at in range(4)]
    events.append(traces.event("autograd::engine::evaluate_function: E", 6 * MS, 30 * MS))
    for number in range(refilled):
        start = (7 + 3 * number) * MS
        events.append(traces.event("aten::zero_", start, start + 2 * MS, args=others))
    for at in range(adds):
        start = (31 + at) * MS
        events.append(traces.event("torch::autograd::AccumulateGrad", start, start + MS - 1))
        events.append(traces.event("aten::add_", start + 1, start + MS - 2, args=args))
    return events


@pytest.mark.parametrize("adds", [4, 8])
def test_refilled_gradients_save_fill_and_first_addition(adds: int) -> None:
    advice = advice_on(zeroed(adds))["zero-grad"]
    assert advice.saves_ns_per_step == pytest.approx(8 * MS, rel=1e-3)
    assert advice.setting == "optimizer.zero_grad(set_to_none=True)"


@pytest.mark.parametrize(
    "other",
    [
        {"refilled": 0},
        {"refilled": 3},
        {"again": "[[9, 8]]"},
        {"shape": "[]", "again": "[]"},
        {"shape": "[9, 9]", "again": "[9, 9]"},
        {"shape": '["9"]', "again": '["9"]'},
    ],
)
def test_gradients_of_products_are_left_out_on_the_cpu(other: dict[str, Any]) -> None:
    """Set to None, they made steps between 9 % shorter and 27 % longer, by the allocator."""
    assert "zero-grad" not in advice_on(zeroed(4, **other))


def loop(times: int) -> list[str]:
    dims = {"Input Dims": [[64]], "Input type": ["float"]}
    each = [traces.event("aten::mul", at * 4 * US, at * 4 * US + 2 * US, args=dims) for at in range(times)]
    return [step(1, 0, 2 * MS), *each]


def test_a_loop_over_samples_is_one_operator() -> None:
    advice = alone(loop(256))
    assert advice.rule == "small-operators"
    gaps = 255 * (2 * US - EVENT_NS - SHAPES_NS - OUTERMOST_NS)
    assert advice.saves_ns_per_step == pytest.approx((256 * 2 * US + gaps) * 255 / 256)
    assert "most of all aten::mul on [[64]], 256 times" in advice.evidence


def test_small_operators_equal_layers_are_no_loop() -> None:
    """Sixty-four layers run an operator 256 times, once forward and three times backward."""
    name = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"

    def layers(count: int) -> list[str]:
        begin = 1200 * US
        return [traces.event(name, begin + at * 2 * US, begin + at * 2 * US + US) for at in range(count)]

    assert "small-operators" not in advice_on(loop(256) + layers(64))
    assert "small-operators" in advice_on(loop(256) + layers(63))


def test_interrupted_call_is_dispatch_like_the_others() -> None:
    events = loop(256)
    dims = {"Input Dims": [[64]], "Input type": ["float"]}
    # It lasts 256 µs more, so that the mean is above what counts as dispatch; Python is as before.
    events[-1] = traces.event("aten::mul", 1020 * US, 1278 * US, args=dims)
    gaps = 255 * (2 * US - EVENT_NS - SHAPES_NS - OUTERMOST_NS)
    assert alone(events).saves_ns_per_step == pytest.approx((256 * DISPATCH_NS + gaps) * 255 / 256)


def apart(name: str, parts: int, more: int) -> list[str]:
    """An operator of 2 ms that holds so many calls of 1 µs, and so many others."""
    inner = [
        traces.event(
            "aten::select", at * 4 * US, at * 4 * US + US, args={"Input Dims": [[parts, 64], [], []]}
        )
        for at in range(parts)
    ]
    others = [
        traces.event(f"aten::other{at}", (1500 + at * 4) * US, (1501 + at * 4) * US) for at in range(more)
    ]
    whole = traces.event(name, 0, 2 * MS, args={"Input Dims": [[parts, 64], []]})
    return [step(1, 0, 4 * MS), whole, *inner, *others]


@pytest.mark.parametrize("more", [0, 20])
def test_what_takes_a_tensor_apart_for_a_loop_goes_with_it(more: int) -> None:
    parts = 256
    selects = parts * US * (parts - 1) / parts
    others = more * US
    around = 2 * MS - parts * US - others - (parts + more) * (EVENT_NS + SHAPES_NS)
    assert alone(apart("aten::unbind", parts, more)).saves_ns_per_step == pytest.approx(
        selects + around + others
    )


def test_what_holds_other_things_as_well_stays() -> None:
    parts = 256
    saved = alone(apart("CheckpointFunctionBackward", parts, 40)).saves_ns_per_step
    assert saved == pytest.approx(parts * US * (parts - 1) / parts)


def test_layers_are_no_loop() -> None:
    assert advice_on(loop(100)) == {}


def gloo(backwards: int, synchronised: int) -> list[str]:
    """Backward passes before one step of the optimizer, of which some exchange gradients for 4 ms."""
    events = [step(1, 0, 100 * MS), annotation("Optimizer.step#SGD.step", 99 * MS, 100 * MS)]
    for number in range(backwards):
        at = number * 10 * MS
        events.append(annotation("DistributedDataParallel.forward", at, at + MS))
        events.append(traces.event("aten::mm", at, at + 6 * MS))
        if number >= backwards - synchronised:
            events.append(annotation("gloo:all_reduce", at + 5 * MS, at + 9 * MS, thread=9))
            events.append(traces.event("torch::distributed::reducer::mul_out", at + MS, at + 2 * MS))
    return events


def test_gradients_are_exchanged_once_per_optimizer_step() -> None:
    advice = alone(gloo(4, 4))
    assert advice.rule == "gradient-accumulation"
    # Of each exchange 3 ms are exposed, another filled the bucket, and of four exchanges one is needed.
    assert advice.saves_ns_per_step == pytest.approx(12 * MS, rel=1e-3)
    assert "for 4 exchanges" in advice.evidence


def test_time_until_a_bucket_is_emptied_is_waiting() -> None:
    events = gloo(4, 4)
    for number in range(4):
        at = number * 10 * MS + 9 * MS + MS // 4
        events.append(
            traces.event("torch.distributed.ddp.reducer::copy_bucket_to_grad", at, at + MS // 2, args=None)
        )
    # Of each exchange 3.25 ms are waited for, 1 ms filled the bucket and half a millisecond emptied it.
    assert alone(events).saves_ns_per_step == pytest.approx(3 * 4.75 * MS, rel=1e-3)


def test_buffers_before_forward_only_follow_gradient_exchange() -> None:
    events = gloo(1, 1)
    for number in range(1, 4):
        at = number * 20 * MS
        events.append(annotation("DistributedDataParallel.forward", at, at + 5 * MS))
        events.append(traces.event("aten::flatten_dense_tensors", at + MS, at + 2 * MS))
        events.append(traces.event("c10d::broadcast_", at + 2 * MS, at + 3 * MS))
        # While it is sent there is no computing: that is exposed, and counted once.
        events.append(annotation("gloo:broadcast", at + 2 * MS, at + 3 * MS, thread=9))
        events.append(traces.event("aten::copy_", at + 3 * MS, at + 4 * MS))
        events.append(traces.event("aten::mm", at + 4 * MS, at + 9 * MS))
        # Copied by the module, and so no part of sending.
        events.append(traces.event("aten::copy_", at + 9 * MS, at + 10 * MS))
        events.append(annotation("gloo:all_reduce", at + 10 * MS, at + 11 * MS, thread=9))
    # The first exchange exposes 3 ms and fills for 1; the others expose 1, and send for 4 what they had.
    assert alone(events).saves_ns_per_step == pytest.approx(3 / 4 * (4 + 3 * 5) * MS, rel=5e-3)


@pytest.mark.parametrize("shaped", [True, False])
def test_computing_is_slower_beside_an_exchange_than_alone(shaped: bool) -> None:
    args = {"Input Dims": [[8, 8]], "Input type": ["float"]} if shaped else {}
    events = gloo(2, 2)
    for number in range(2):
        at = 40 * MS + number * 20 * MS
        events.append(traces.event("aten::bmm", at, at + 2 * MS, args=args))
        events.append(traces.event("aten::bmm", at + 5 * MS, at + 9 * MS, args=args))
        events.append(annotation("gloo:all_reduce", at + 6 * MS, at + 8 * MS, thread=9))
    # Both exchanges expose 3 ms, and fill for 1 ms; beside an exchange each bmm takes 2 ms longer.
    slower = 4 * MS if shaped else 0
    assert alone(events).saves_ns_per_step == pytest.approx((8 * MS + slower) / 2, rel=5e-3)


@pytest.mark.parametrize(("backwards", "synchronised"), [(4, 1), (1, 1)])
def test_an_exchange_that_is_needed_is_left_alone(backwards: int, synchronised: int) -> None:
    assert advice_on(gloo(backwards, synchronised)) == {}


def launched(at: int, name: str, start: int, end: int, *, number: int, cat: str = "kernel") -> list[str]:
    """A launch from within an operator, and what it launched."""
    types = {"Input type": ["float", "float"], "Input Dims": [[8, 8], [8, 8]], "External id": number}
    return [
        traces.event("aten::mm", at, at + 4 * US, args=types),
        traces.event(
            "cudaLaunchKernel", at + US, at + 3 * US, cat="cuda_runtime", args={"correlation": number}
        ),
        kernel(name, start, end, cat=cat, correlation=number, **{"External id": number}),
    ]


def device_step(length: int, period: int, name: str = "gemm", cat: str = "kernel") -> list[str]:
    events = [step(1, 0, MS)]
    for number in range(1, MS // period):
        at = number * period
        events += launched(at, name, at + 3 * US, at + 3 * US + length, number=number, cat=cat)
    return events


def test_tiny_kernels_are_launched_as_graphs() -> None:
    advice = advice_on(device_step(4 * US, 10 * US))["tiny-kernels"]
    # The device's 99 kernels of 4 µs remain, a µs apart; recording 100 events is no part of the step.
    unrecorded = MS - 100 * (EVENT_NS + SHAPES_NS + AFTER_NS)
    assert advice.saves_ns_per_step == pytest.approx(unrecorded - 99 * 5 * US, rel=0.01)
    assert "half of them shorter than 4 µs" in advice.evidence


def test_compiling_saves_the_hosts_time_of_the_model_alone() -> None:
    events = device_step(25 * US, 50 * US)
    phases = {"forward": 10, "loss": 5, "backward": 10, "optimizer": 35, "other": 40}
    trace = traces.trace_of(events, torchperfd={"unrecorded_phase_ns": phases})
    found = {each.rule: each for each in analysis.summarise(trace).advice}
    # Of 25 % of the host's time what 19 launches take remains; the rest is no part of the model.
    unrecorded = MS - 20 * (EVENT_NS + SHAPES_NS + AFTER_NS)
    saved = 0.25 * unrecorded * (1 - 19 * 5 * US / MS)
    assert found["host-bound"].saves_ns_per_step == pytest.approx(saved, rel=0.02)


def test_fused_update_for_an_idle_device_saves_its_hosts_time() -> None:
    events = [*adam("AdamW", 70, 5 * US), *launched(0, "gemm", 0, US, number=1)]
    found = advice_on(events)["fused-optimizer"]
    assert "70 operators, parameter by parameter: 649 µs a step, 634 µs of it" in found.evidence
    assert found.saves_ns_per_step == pytest.approx(640 * US, rel=0.01)


def test_larger_kernels_the_host_cannot_queue_are_compiled() -> None:
    found = advice_on(device_step(25 * US, 50 * US))
    assert "host-bound" in found
    assert found["host-bound"].setting == "model = torch.compile(model)"


def with_memory(events: list[str], reserved: int, total: int) -> analysis.Trace:
    instant = {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 1, "tid": 1, "s": "t"}
    instant |= {"ts": float(traces.microseconds(traces.ORIGIN_NS)), "args": {"Bytes": 1, "Device Type": 1}}
    instant["args"] |= {"Total Reserved": reserved}  # type: ignore[operator]
    trace = traces.trace_of([*events, json.dumps(instant)])
    trace.device_memory = total
    return trace


@pytest.mark.parametrize(("free", "rule"), [(0.7, "batch-size"), (0.3, "host-bound")])
def test_where_memory_is_free_the_batch_may_grow(free: float, rule: str) -> None:
    trains = traces.event("MulBackward0", 0, US)
    trace = with_memory([*device_step(25 * US, 50 * US), trains], round((1 - free) * 2**30), 2**30)
    found = {each.rule: each for each in analysis.summarise(trace).advice}
    assert rule in found
    if rule == "batch-size":
        # Two batches take the host as long as one, and the device twice as long: neither idles then.
        assert found[rule].saves_ns_per_step == pytest.approx(MS / 2, rel=0.05)


def test_memory_that_is_nearly_full_is_a_risk_without_a_saving() -> None:
    events = [step(1, 0, MS), kernel("gemm", 0, MS), traces.event("MulBackward0", 0, US)]
    trace = with_memory(events, 95 * 2**30, 100 * 2**30)
    (advice,) = analysis.summarise(trace).advice
    assert advice.rule == "memory-near-full"
    assert advice.saves_ns_per_step == 0
    assert "95% of the device's 100.0 GiB" in advice.evidence


def test_pageable_copies_want_pinned_memory() -> None:
    events = [step(1, 0, MS), kernel("gemm", 0, 500 * US)]
    events.append(kernel("Memcpy HtoD (Pageable -> Device)", 500 * US, MS, cat="gpu_memcpy"))
    advice = alone(events)
    assert advice.rule == "pin-memory"
    assert advice.saves_ns_per_step == pytest.approx(250 * US)
    for generation, saved in ((7, 250), (8, 375), (9, 437.5), (12, 437.5)):
        trace = traces.trace_of(events, deviceProperties=[{"computeMajor": generation}])
        [advice] = analysis.summarise(trace).advice
        assert advice.saves_ns_per_step == pytest.approx(saved * US)
    pinned = [each.replace("Pageable", "Pinned") for each in events]
    assert advice_on(pinned) == {}


def test_single_precision_products_want_autocast() -> None:
    advice = alone([step(1, 0, MS), *launched(0, "gemm", 0, 900 * US, number=1)])
    assert advice.rule == "mixed-precision"
    assert advice.saves_ns_per_step == pytest.approx(450 * US)


@pytest.mark.parametrize(
    "kernel", ["sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn", "ampere_fp16_s16816gemm_fp16_128x64"]
)
def test_products_already_in_half_precision_need_no_advice(kernel: str) -> None:
    assert advice_on([step(1, 0, MS), *launched(0, kernel, 0, 900 * US, number=1)]) == {}


def test_shorter_kernels_on_a_launch_bound_host_save_nothing() -> None:
    assert set(advice_on(device_step(25 * US, 50 * US))) == {"host-bound"}


def test_where_little_is_eligible_autocast_is_not_advised() -> None:
    events = [step(1, 0, MS), *launched(0, "gemm", 0, 180 * US, number=1)]
    events.append(kernel("elementwise", 180 * US, MS))
    assert advice_on(events) == {}


def test_exposed_communication_is_sent_in_half_precision() -> None:
    events = [
        step(1, 0, MS),
        kernel("gemm", 0, 600 * US),
        annotation("DistributedDataParallel.forward", 0, US),
    ]
    events += [
        traces.event("MulBackward0", US, 2 * US),
        kernel("ncclDevKernel_AllReduce_Sum_f32", 500 * US, MS),
    ]
    advice = alone(events)
    assert advice.rule == "exposed-communication"
    # It takes half of its 500 µs, and ends after computing still.
    assert advice.saves_ns_per_step == pytest.approx(250 * US, rel=1e-3)


def test_gloo_beside_a_device_wants_nccl() -> None:
    events = [step(1, 0, MS), kernel("gemm", 0, 400 * US), kernel("gemm", 900 * US, MS)]
    events.append(annotation("gloo:all_reduce", 300 * US, 800 * US, thread=9))
    events.append(traces.event("cudaGetDevice", 0, US, cat="cuda_runtime"))
    advice = advice_on(events)["backend"]
    assert advice.saves_ns_per_step == pytest.approx(250 * US, rel=2e-3)


def test_data_parallel_wants_a_process_for_each_device() -> None:
    events = [step(1, 0, MS), annotation("DataParallel.forward", 0, 900 * US)]
    events += [traces.event("Broadcast", 0, 200 * US), traces.event("Gather", 500 * US, 600 * US)]
    advice = alone(events)
    assert advice.rule == "data-parallel"
    assert advice.saves_ns_per_step == pytest.approx(300 * US)


def test_a_wait_for_the_device_is_named_by_what_asked_for_it() -> None:
    events = [step(1, 0, MS), *launched(0, "gemm", 5 * US, 100 * US, number=1)]
    events += [
        traces.event("aten::item", 10 * US, 400 * US),
        traces.event("cudaStreamSynchronize", 20 * US, 390 * US, cat="cuda_runtime"),
        *launched(400 * US, "gemm", 404 * US, MS, number=2),
    ]
    advice = advice_on(events)["needless-synchronisation"]
    assert advice.saves_ns_per_step == pytest.approx(304 * US, rel=0.01)
    assert "aten::item" in advice.change


FINDINGS = st.lists(
    st.builds(
        Finding,
        rule=st.text(max_size=3),
        evidence=st.just("e"),
        edit=st.builds(Edit, host_share=st.floats(0, 1)),
        change=st.just("c"),
        setting=st.just("s"),
        risk=st.booleans(),
        most_ns=st.floats(0, 2e9),
    )
)


def of_host(step_ns: float) -> Callable[[Edit], float]:
    return lambda edit: edit.host_share * step_ns


@given(FINDINGS, st.floats(1, 1e9), st.floats(0, 1e5))
def test_all_savings_together_are_never_more_than_the_step(
    findings: list[Finding], step_ns: float, margin: float
) -> None:
    advice = weigh(findings, of_host(step_ns), step_ns, margin_ns=margin)
    assert sum(each.saves_ns_per_step for each in advice) <= step_ns * (1 + 1e-9)
    savings = [each.saves_ns_per_step for each in advice]
    assert savings == sorted(savings, reverse=True)
    risks = {each.rule for each in findings if each.risk}
    for each in advice:
        worth_it = each.saves_ns_per_step >= max(MIN_NS, MIN_SHARE * step_ns * (1 - 1e-9))
        assert each.share_of_step == pytest.approx(each.saves_ns_per_step / step_ns)
        assert worth_it or (each.saves_ns_per_step == 0 and each.rule in risks)


def test_what_saves_next_to_nothing_is_not_said() -> None:
    def say(saves: float, step_ns: float, margin: float = 0.0) -> tuple[Advice, ...]:
        edit = Edit(host_share=saves / step_ns)
        return weigh([Finding("r", "e", edit, "c", "s")], of_host(step_ns), step_ns, margin_ns=margin)

    assert say(MIN_NS, MIN_NS)
    assert not say(MIN_NS - 1, MIN_NS)
    assert say(MIN_NS / MIN_SHARE, MIN_NS / MIN_SHARE)
    assert not say(MIN_NS, MIN_NS / MIN_SHARE * 1.01)
    assert say(3 * MIN_NS, 4 * MIN_NS, MIN_NS)
    assert not say(3 * MIN_NS, 4 * MIN_NS, 2.1 * MIN_NS)


def test_ranks_with_one_problem_are_one_piece_of_advice() -> None:
    def advice(rule: str, saves: float) -> Advice:
        return Advice(rule, f"{rule} {saves}", saves, saves / 100, "c", "s")

    found = gather(
        [(3, [advice("a", 10), advice("b", 5)]), (0, [advice("a", 20)]), (None, [advice("c", 15)])]
    )
    assert [(each.rule, each.saves_ns_per_step, each.ranks) for each in found] == [
        ("a", 20, (0, 3)),
        ("c", 15, ()),
        ("b", 5, (3,)),
    ]
    assert found[0].evidence == "a 20"


def test_gather_rank_that_loses_little_by_it_is_not_named() -> None:
    """One rank's loader is slow: its peer waits 5.2 ms a step for data and loses nothing by that."""

    def data(saves_ms: float) -> list[Advice]:
        return [Advice("loader-workers", f"{saves_ms} ms", saves_ms * MS, saves_ms / 166, "c", "s")]

    (found,) = gather([(0, data(5.2)), (1, data(131))])
    assert (found.ranks, found.evidence, found.saves_ns_per_step) == ((1,), "131 ms", 131 * MS)
    (found,) = gather([(0, data(129)), (1, data(131)), (2, data(60)), (3, data(66))])
    assert found.ranks == (0, 1, 3)


def test_gather_risk_that_costs_nothing_yet_names_all_its_ranks() -> None:
    (found,) = gather([(rank, [Advice("memory", "e", 0.0, 0.0, "c", "s")]) for rank in (0, 2)])
    assert found.ranks == (0, 2)


def test_the_last_to_come_to_an_exchange_shows_what_it_costs() -> None:
    def waits(saves: float, rule: str = "gradient-accumulation") -> list[Advice]:
        return [Advice(rule, f"{saves}", saves, saves / 100, "c", "s")]

    (found,) = gather([(0, waits(50)), (1, waits(20))])
    assert (found.evidence, found.ranks) == ("20", (0, 1))
    assert gather([(0, waits(50)), (1, [])]) == ()
    assert gather([(0, waits(50, "float64")), (1, [])])[0].saves_ns_per_step == 50


@given(st.data())
def test_self_times_are_those_of_a_walk_over_the_tree(data: st.DataObject) -> None:
    """Work and overhead, against a tree grown here whose own times are known beforehand."""
    events: list[str] = []
    expected: list[tuple[int, int]] = []

    def grow(start: int, depth: int) -> int:
        own = data.draw(st.integers(0, 9)) * US
        at, children = start + own, data.draw(st.integers(0, 3 if depth < 3 else 0))
        place = len(expected)
        expected.append((0, 0))
        for _ in range(children):
            at = grow(at, depth + 1) + 1
        end = at + 1
        expected[place] = (depth, own + 1 + children - children * EVENT_NS)
        events.append(traces.event("aten::x", start, end))
        return end

    at = 0
    for _ in range(data.draw(st.integers(1, 4))):
        at = grow(at, 0) + 1
    trace = traces.trace_of([step(1, 0, at + 1), *events])
    found = analysis.steps(trace)
    context = AdviceContext(trace, found, analysis.DeviceTime(trace).within([(0, at + 1)]), None)
    calls = context.calls
    assert calls.depth.tolist() == [depth for depth, _ in expected]
    assert calls.work_ns.tolist() == [max(own - DISPATCH_NS, 0) for _, own in expected]
    inner = calls.depth > 0
    assert (calls.work_ns + calls.overhead_ns)[inner].tolist() == [own for depth, own in expected if depth]
    assert context.outer.work_ns.sum() == calls.work_ns.sum()
    assert context.outer.overhead_ns.sum() == calls.overhead_ns.sum()


def test_the_recording_is_taken_off_by_kind() -> None:
    events = [
        step(1, 0, MS),
        traces.event("aten::mm", 0, 500 * US, args={"Input Dims": [[2, 2]]}),
        traces.event("train.py(1): f", 0, MS, cat="python_function"),
    ]
    trace = with_memory(events, 0, 0)
    context = AdviceContext(trace, analysis.steps(trace), analysis.DeviceTime(trace).within([(0, MS)]), None)
    recorded = 2 * (EVENT_NS + SHAPES_NS + AFTER_NS) + FRAME_NS + MEMORY_NS
    assert context.recording(np.array([0]), np.array([MS])).tolist() == [recorded]
    assert context.step_ns == MS - recorded


def scaled(*events: str, unrecorded_ns: object, steps: int = 1, last_ns: int = MS) -> AdviceContext:
    """The context of steps of 1 ms, but for the last, each with 400 operators."""
    return context_of(*events, unrecorded_ns=unrecorded_ns, lengths=[*[MS] * (steps - 1), last_ns])


def context_of(*events: str, unrecorded_ns: object, lengths: list[int]) -> AdviceContext:
    """The context of steps of these lengths, one after another, each with 400 operators."""
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    operators = [
        traces.event("aten::mm", start + number * US, start + number * US + 500)
        for start in starts
        for number in range(400)
    ]
    marks = [step(at, start, end) for at, (start, end) in enumerate(zip(starts, ends, strict=True))]
    trace = traces.trace_of([*marks, *operators, *events], torchperfd={"unrecorded_step_ns": unrecorded_ns})
    found = analysis.steps(trace)
    spans = [(each.start_ns, each.start_ns + each.duration_ns) for each in found]
    return AdviceContext(trace, found, analysis.DeviceTime(trace).within(spans), None)


EXPECTED_NS = 401 * (EVENT_NS + AFTER_NS)
"""What recording one of these steps is expected to cost."""


@pytest.mark.parametrize("times", [0.6, 1.0, 2.0])
def test_earlier_steps_give_the_recording_speed(times: float) -> None:
    context = scaled(unrecorded_ns=round(MS - times * EXPECTED_NS), steps=2)
    weight = 0.25 / (0.25 + (0.03 * MS / EXPECTED_NS) ** 2)
    assert context.step_ns == pytest.approx(MS - (1 + weight * (times - 1)) * EXPECTED_NS, abs=1)
    assert context.step_ns == pytest.approx(MS - times * EXPECTED_NS, rel=0.05)


def test_earlier_steps_that_are_far_shorter_are_not_used() -> None:
    assert scaled(unrecorded_ns=1).step_ns >= MS - 3 * EXPECTED_NS
    assert scaled(unrecorded_ns=10 * MS).step_ns == pytest.approx(MS - EXPECTED_NS / 3, abs=1)


@pytest.mark.parametrize(
    "longer", [[2.0, 2.0, *[4.0] * 6], [1.9, 2.5, *[4.0] * 6], [4.0] * 8], ids=["even", "uneven", "all"]
)
def test_few_steps_without_memory_waits_barely_set_the_cost(longer: list[float]) -> None:
    before = round(MS - EXPECTED_NS)
    context = context_of(unrecorded_ns=before, lengths=[round(times * MS) for times in longer])
    assert context.count == 2
    kept = statistics.fmean(sorted(longer)[:2]) * MS
    assert kept - 1.5 * EXPECTED_NS < context.step_ns <= kept - EXPECTED_NS


@pytest.mark.parametrize("unrecorded_ns", [0, -5])
def test_without_such_a_time_the_usual_cost_is_taken_off(unrecorded_ns: int) -> None:
    assert scaled(unrecorded_ns=unrecorded_ns).step_ns == MS - EXPECTED_NS


def test_a_time_that_is_no_number_costs_the_trace_nothing() -> None:
    assert scaled(unrecorded_ns="soon").step_ns == MS - EXPECTED_NS


@pytest.mark.parametrize(
    ("busy_us", "unrecorded_us", "step_us"), [(1, 300, 300), (1, 0, None), (1, 2000, None), (500, 300, 500)]
)
def test_step_of_a_host_that_launches_is_the_unrecorded_one(
    busy_us: int, unrecorded_us: int, step_us: int | None
) -> None:
    """CUPTI makes every launch longer, which the number of events does not show."""
    context = scaled(kernel("k", 0, busy_us * US), unrecorded_ns=unrecorded_us * US)
    assert context.step_ns == (MS - EXPECTED_NS if step_us is None else step_us * US)


def test_recording_may_overlap_worker_waits() -> None:
    fast = round(MS - 2 * EXPECTED_NS)
    wait = annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 900 * US)
    waiting = scaled(wait, unrecorded_ns=fast)
    expected = EXPECTED_NS + EVENT_NS + AFTER_NS
    assert MS - 1.1 * expected < waiting.step_ns < MS - expected


def test_steps_that_recording_cannot_explain_are_left_out() -> None:
    before = round(MS - EXPECTED_NS)
    assert scaled(unrecorded_ns=before, steps=4, last_ns=9 * MS).count == 3
    assert scaled(unrecorded_ns=before, steps=4, last_ns=9 * MS).step_ns == pytest.approx(before, abs=1)
    assert scaled(unrecorded_ns=before, steps=4, last_ns=MS + 100 * US).count == 4
    assert scaled(unrecorded_ns=before // 4, steps=8, last_ns=9 * MS).count == 2
    # Without a time of unrecorded steps, one that is far longer than the others is no usual one.
    assert scaled(unrecorded_ns=0, steps=4, last_ns=9 * MS).count == 3


def test_steps_that_wait_for_their_loader_are_not_left_out() -> None:
    wait = annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 4 * MS, 11 * MS)
    before = round(MS - EXPECTED_NS)
    assert scaled(wait, unrecorded_ns=before, steps=4, last_ns=8 * MS).count == 4


@pytest.mark.parametrize("unrecorded_us", [0, 4_000, 8_000, 16_000, 30_000])
def test_what_is_saved_is_of_steps_that_are_not_recorded(unrecorded_us: int) -> None:
    trace = traces.trace_of(
        doubles("double", "[64, 64]"), torchperfd={"unrecorded_step_ns": unrecorded_us * US}
    )
    found = analysis.steps(trace)
    context = AdviceContext(trace, found, analysis.DeviceTime(trace).within([(0, 10 * MS)]), None)
    (advice,) = analysis.summarise(trace).advice
    longer = context.step_ns / (unrecorded_us * US) if unrecorded_us else 1.0
    inflation = min(max(longer, 0.5), 2.0)
    work = 9 * MS - 2 * DISPATCH_NS - context.recording(np.array([0]), np.array([9 * MS]))[0]
    assert advice.saves_ns_per_step == pytest.approx(work / 2 / inflation, rel=2e-3)
    assert advice.share_of_step == pytest.approx(work / 2 / context.step_ns, rel=2e-3)


def test_text_and_dictionary_say_the_same() -> None:
    advice = [
        Advice("a", "what \x1b shows", 1_500_000, 0.25, "do this", "f(x)", (0, 3)),
        Advice("d", "held up", 900_000, 0.15, "do that", "h(x)", margin_ns=300_000),
        Advice("b", "near", 0, 0, "make room", "g(x)"),
    ]
    assert render(analysis.advice_document(advice)).splitlines() == [
        "Advice",
        "1. do this: saves 1.5 ms a step (25%), on ranks 0,3",
        "   what ? shows",
        "   f(x)",
        "2. do that: saves 600 µs to 1.2 ms a step (15%)",
        "   held up",
        "   h(x)",
        "3. make room: a risk, no time",
        "   near",
        "   g(x)",
    ]
    assert analysis.advice_to_dict(advice)[0] == {
        "rule": "a",
        "ranks": [0, 3],
        "evidence": "what \x1b shows",
        "saves_us_per_step": 1500.0,
        "margin_us_per_step": 0.0,
        "per": "step",
        "share_of_step": 0.25,
        "change": "do this",
        "setting": "f(x)",
    }
    assert render(analysis.advice_document([])) == ""


def test_times_read_well() -> None:
    assert [ns_text(85_400), ns_text(12_345_678)] == ["85.4 µs", "12.3 ms"]


def test_data_made_on_the_host_is_made_on_the_device() -> None:
    events = []
    for number in range(4):
        at = number * 12 * MS
        events += [
            step(number, at, at + 12 * MS),
            traces.event("aten::normal_", at + 60 * US, at + 9040 * US),
            *launched(at + 9500 * US, "knead_mm", at + 9600 * US, at + 11_900 * US, number=number + 1),
        ]
    advice = advice_on(events)["host-compute"]
    assert advice.change == "make the data on the device: aten::normal_"
    assert advice.saves_ns_per_step == pytest.approx(8.98 * MS, rel=1e-3)
    assert not {"host-bound", "batch-size", "tiny-kernels"} & set(advice_on(events))


def graph(*kernels: tuple[str, int]) -> list[str]:
    """A step of one graph, whose kernels belong to an operator without types."""
    types = {"Input type": ["float"], "Input Dims": [[8, 8]], "External id": 5}
    events = [
        step(1, 0, MS),
        traces.event("CompiledFunction", 0, 90 * US, args=types),
        traces.event("cudaGraphLaunch", 10 * US, 20 * US, cat="cuda_runtime", args={"correlation": 77}),
    ]
    at = 30 * US
    for name, length in kernels:
        events.append(kernel(name, at, at + length, correlation=77))
        at += length
    return events


@pytest.mark.parametrize(
    "name",
    [
        "ampere_sgemm_128x64_tn",
        "volta_sgemm_64x64_nt",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16>(int)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(Params)",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)",
        "cudnn_volta_scudnn_128x64_relu_xregs_large_nn_v1",
        "Cijk_Ailk_Bljk_SB_MT128x64x16_SE_K1",
    ],
)
def test_products_of_a_graph_are_identified_by_kernels(name: str) -> None:
    advice = advice_on(graph((name, 600 * US), ("triton_poi_fused_add_0", 300 * US)))["mixed-precision"]
    assert "67% of the kernels' time" in advice.evidence


@pytest.mark.parametrize(
    "name",
    [
        "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn",
        "ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_tn",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
        "void gemvNSP_kernel<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 1, 32>(int)",
        "Cijk_Ailk_Bljk_HHS_BH_MT128x64x16",
        "ampere_dgemm_64x64_tn",
        "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float> >(int)",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::half_t> >(Params)",
    ],
)
def test_kernels_of_a_graph_in_other_formats_are_left_alone(name: str) -> None:
    assert "mixed-precision" not in advice_on(graph((name, 600 * US)))


def test_a_wait_saves_no_more_than_the_host_waited() -> None:
    events = [step(1, 0, 10 * MS), *launched(0, "gemm", 5 * US, MS, number=1)]
    events += [
        traces.event("cudaStreamSynchronize", 500 * US, 1500 * US, cat="cuda_runtime"),
        traces.event("train.py(1): prepare", 1500 * US, 8000 * US, cat="python_function"),
        *launched(8100 * US, "gemm", 8200 * US, 10 * MS, number=2),
    ]
    # The device idles from 1 to 8.2 ms, and the host waited for 1 ms.
    events = [each.replace("gemm", "gemm_bf16") for each in events]
    assert advice_on(events)["needless-synchronisation"].saves_ns_per_step == pytest.approx(MS, rel=0.06)
