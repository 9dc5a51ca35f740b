"""Advice on devices and exchanges: each rule on a trace made for it, with the saving worked out by hand."""

import pytest
from tests.unit.daemon import traces
from tests.unit.daemon.advice_traces import (
    MS,
    US,
    adam,
    advice_on,
    alone,
    annotation,
    device_step,
    kernel,
    launched,
    step,
    with_memory,
)

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import rules
from torchperfd_daemon.analysis.advice.recording import (
    AFTER_NS,
    EVENT_NS,
    SHAPES_NS,
)


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the traces of these tests be as short as what they show; `test_advice_conditions` has the floor."""
    monkeypatch.setattr(rules, "MIN_RECORDED_NS", 0)


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
