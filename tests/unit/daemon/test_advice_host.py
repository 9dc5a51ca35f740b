"""Advice on the loader and the host: each rule on a trace made for it, with the saving worked out by hand."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.daemon import traces
from tests.unit.daemon.advice_traces import (
    MS,
    US,
    adam,
    advice_on,
    alone,
    annotation,
    doubles,
    draw,
    step,
)

from torchperfd.model.loader_facts import UNMEASURED_COST, LoaderFacts
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import rules
from torchperfd_daemon.analysis.advice.recording import (
    DISPATCH_NS,
    EVENT_NS,
    OUTERMOST_NS,
    SHAPES_NS,
)
from torchperfd_daemon.analysis.advice.rules import MIN_NS, Advice
from torchperfd_daemon.loader_workers import advise_loader


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the traces of these tests be as short as what they show; `test_advice_conditions` has the floor."""
    monkeypatch.setattr(rules, "MIN_RECORDED_NS", 0)


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
