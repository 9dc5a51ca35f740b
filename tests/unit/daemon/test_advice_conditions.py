"""Each condition of a rule: a run for which it holds gets the advice, and one that breaks it gets none."""

import re
from typing import Any, Final

import pytest
from tests.support.runs import MS, US, Run
from tests.support.values import some
from tests.unit.daemon import traces


def late_host(run: Run | None = None, *, steps: int = 4, kernel: str = "gemm_bf16", lost: int = 0) -> Run:
    """A host that launches kernels of 5 µs every 100 µs; of each step so many launches lost their kernel."""
    run = run or Run()
    run.steps(steps, 4 * MS)
    for at in range(40 * steps):
        start = at * 100 * US
        found = None if at % 40 < lost else (kernel, start + 92 * US, start + 97 * US)
        run.launches("aten::mul", start, start + 90 * US, found)
    return run


def test_late_host_is_told_to_launch_graphs() -> None:
    (advice,) = late_host().advice().values()
    assert advice.rule == "tiny-kernels"
    assert 'mode="reduce-overhead"' in advice.setting


def without_stack(name: str, start: int, end: int, cat: str = "user_annotation") -> Any:
    def add(run: Run) -> None:
        run.host(name, start, end, cat)

    return add


@pytest.mark.parametrize(
    "broken",
    [
        without_stack("Torch-Compiled Region: 0/0", 0, MS),
        without_stack("## Call CompiledFxGraph fabc", 0, MS),
        without_stack("cudaGraphLaunch", 0, 10 * US, "cuda_runtime"),
        without_stack("cudaStreamBeginCapture", 0, US, "cuda_runtime"),
        without_stack("hipStreamEndCapture", 8 * MS, 8 * MS + US, "cuda_runtime"),
    ],
    ids=["compiled", "inductor", "graphs", "capture begun", "capture ended"],
)
def test_late_host_that_compiles_already_gets_no_such_advice(broken: Any) -> None:
    run = late_host()
    broken(run)
    assert not set(run.advice()) & {"tiny-kernels", "host-bound"}


def test_late_host_with_compiled_kernels_gets_no_such_advice() -> None:
    assert late_host(kernel="triton_poi_fused_add_0").advice() == {}


def test_idle_advice_needs_the_kernels_of_most_launches() -> None:
    assert late_host(lost=2).advice()
    run = late_host(lost=20)
    assert run.advice() == {}
    assert any("only 50% of the launches" in line for line in run.notes())


def test_late_host_of_a_device_without_graphs_is_compiled() -> None:
    (advice,) = late_host(Run("xpu_runtime", "urEnqueueKernelLaunch")).advice().values()
    assert advice.setting == "model = torch.compile(model)"
    assert late_host(Run("mtia_runtime", "mtiaLaunchKernel")).advice() == {}


def test_late_host_without_operators_is_not_known_to_be_late() -> None:
    run = late_host()
    run.events = [each for each in run.events if '"cat": "cpu_op"' not in each]
    assert run.advice() == {}


def test_advice_needs_three_steps_or_ten_milliseconds() -> None:
    assert late_host(steps=3).advice()
    assert late_host(steps=2).advice() == {}
    long = late_host(steps=2)
    long.annotate("warm", 8 * MS, 11 * MS)
    assert long.advice()


def products(run: Run, *, single: bool = True) -> Run:
    """Kernels of 3 ms in each of four steps of 4 ms, in single precision, launched early."""
    run.steps(4, 4 * MS)
    for at in range(4):
        name = "ampere_sgemm_128x64_tn" if single else "gemm_bf16"
        run.events.append(traces.event("x", at * 4 * MS, at * 4 * MS + US, cat=run.category))
        run.events.append(traces.event(name, at * 4 * MS, at * 4 * MS + 3 * MS, cat="kernel", thread=7))
    return run


@pytest.mark.parametrize(
    ("category", "call", "written"),
    [
        ("cuda_runtime", "cudaLaunchKernel", '"cuda"'),
        ("cuda_runtime", "hipLaunchKernel", '"cuda"'),
        ("xpu_runtime", "urEnqueueKernelLaunch", '"xpu"'),
        ("mtia_runtime", "mtiaLaunch", '"mtia"'),
        ("privateuse1_runtime", "aclrtLaunchKernel", '"npu"'),
        ("privateuse1_runtime", "someCall", "device.type"),
    ],
)
def test_setting_names_the_type_of_the_device(category: str, call: str, written: str) -> None:
    run = products(Run(category, call))
    run.call(call, 0, US)
    assert f"torch.autocast({written}, dtype=torch.bfloat16)" in run.advice()["mixed-precision"].setting


def test_inference_is_not_told_of_a_loss() -> None:
    assert "loss" in products(Run().trains()).advice()["mixed-precision"].setting
    setting = products(Run()).advice()["mixed-precision"].setting
    assert "loss" not in setting
    assert "model(x)" in setting


def exchanging(
    *wrappers: str,
    kind: str = "allreduce",
    dtype: str = "Float",
    kernel: str = "ncclDevKernel_Generic",
    trains: bool = True,
) -> Run:
    """Four steps of 10 ms: 5 ms of computing, then 4 ms of one collective with nothing beside it."""
    run = Run().steps(4, 10 * MS)
    if trains:
        run.trains()
    for at in range(0, 40 * MS, 10 * MS):
        run.launches("aten::mm", at, at + 20 * US, ("gemm_bf16", at + 40 * US, at + 5 * MS))
        for wrapper in wrappers:
            run.annotate(wrapper, at + 30 * US, at + 40 * US)
        described = {"Collective name": kind, "dtype": dtype} if kind else {}
        run.launches(
            "nccl:op", at + 50 * US, at + 70 * US, (kernel, at + 5 * MS, at + 9 * MS), stream=20, **described
        )
    return run


DDP: Final = "DistributedDataParallel.forward"


def test_gradients_of_ddp_in_single_precision_are_compressed() -> None:
    advice = exchanging(DDP).advice()["exposed-communication"]
    assert "bf16_compress_hook" in advice.setting
    assert advice.saves_ns_per_step == pytest.approx(2 * MS, rel=1e-3)
    assert "4 ms of each step" in advice.evidence


@pytest.mark.parametrize(
    ("run", "setting"),
    [
        (exchanging(DDP, dtype="BFloat16"), "bucket_cap_mb=10"),
        (exchanging(DDP, dtype=""), "bucket_cap_mb=10"),
        (exchanging(DDP, kind="all_to_all"), "torch.distributed.all_to_all_single"),
        (exchanging(), "torch.distributed.all_reduce(tensor, async_op=True)"),
        (
            exchanging(dtype="BFloat16", kind="_reduce_scatter_base"),
            "torch.distributed.reduce_scatter_tensor",
        ),
        (exchanging("FSDP::all_gather (layer)", kind="_allgather_base"), "set_modules_to_forward_prefetch"),
        (exchanging("FullyShardedDataParallel.forward", kind="_allgather_base"), "forward_prefetch=True"),
        (exchanging("Optimizer.step#ZeroRedundancyOptimizer.step"), "ZeroRedundancyOptimizer(..."),
        (exchanging("deepspeed/runtime/zero/stage3.py(9): f"), '"overlap_comm": true'),
        (
            exchanging(
                kind="", kernel="void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", trains=False
            ),
            "torch.distributed.all_reduce(tensor, async_op=True)",
        ),
    ],
    ids=[
        *("2 bytes", "unknown type", "DDP's other", "no wrapper", "own optimizer", "FSDP2", "FSDP1", "ZeRO"),
        *("DeepSpeed", "tensor parallel"),
    ],
)
def test_exchange_advice_is_of_the_wrapper_kind_and_type(run: Run, setting: str) -> None:
    advice = run.advice()["exposed-communication"]
    assert setting in advice.setting
    assert "hook" not in advice.setting


def test_exchanges_of_inference_are_no_gradients() -> None:
    advice = exchanging(DDP, trains=False).advice()["exposed-communication"]
    assert "gradient" not in advice.change + advice.evidence + advice.setting


def test_backward_of_fsdp_may_keep_parameters_and_inference_not() -> None:
    both = [exchanging("FSDP::pre", kind="_allgather_base", trains=trains) for trains in (True, False)]
    found = [run.advice()["exposed-communication"].setting for run in both]
    assert ["reshard_after_forward=False" in setting for setting in found] == [True, False]


def updating(kind: str, *, run: Run | None = None, inside: str = "") -> Run:
    """Four steps of 10 ms whose optimizer runs 80 operators of 90 µs, each of which launches a kernel."""
    run = (run or Run()).steps(4, 10 * MS).trains()
    for at in range(0, 40 * MS, 10 * MS):
        run.annotate(f"Optimizer.step#{kind}.step", at + 100 * US, at + 9 * MS)
        for number in range(80):
            start = at + (number + 2) * 100 * US
            run.launches("aten::mul_", start, start + 90 * US, ("mul", start + 91 * US, start + 95 * US))
        if inside:
            run.annotate(inside, at + 150 * US, at + 160 * US)
    return run


@pytest.mark.parametrize(
    ("kind", "category", "setting"),
    [
        ("AdamW", "cuda_runtime", "torch.optim.AdamW(..., fused=True)"),
        ("NAdam", "cuda_runtime", "torch.optim.NAdam(..., foreach=True)"),
        ("Adagrad", "xpu_runtime", "torch.optim.Adagrad(..., foreach=True)"),
        ("NorMuon", "cuda_runtime", "torch.compile(optimizer.step), or torch._foreach_mul_"),
        ("Muon", "cuda_runtime", "torch.compile(optimizer.step), or torch._foreach_mul_"),
        ("LBFGS", "xpu_runtime", "torch.compile(optimizer.step), or torch._foreach_mul_"),
    ],
)
def test_optimizer_advice_is_what_its_class_accepts(kind: str, category: str, setting: str) -> None:
    launch = "cudaLaunchKernel" if category == "cuda_runtime" else "urEnqueueKernelLaunch"
    found = updating(kind, run=Run(category, launch)).advice()
    advice = found.get("fused-optimizer") or found["compiled-optimizer"]
    assert setting in advice.setting


def test_optimizer_that_runs_compiled_code_is_not_compiled_again() -> None:
    run = updating("NorMuon", inside="Torch-Compiled Region: 1/0")
    assert "compiled-optimizer" not in run.advice()


def test_optimizer_of_ones_own_file_is_not_torchs() -> None:
    run = updating("AdamW")
    run.host("my/optim.py(10): step", 0, US, "python_function")
    assert "fused-optimizer" not in run.advice()
    run.host("torch/optim/adamw.py(10): step", 0, US, "python_function")
    assert "fused-optimizer" in run.advice()


def test_optimizer_saves_no_more_than_its_evidence_says() -> None:
    advice = updating("AdamW").advice()["fused-optimizer"]
    removable = float(re.findall(r"([\d.]+) ms of it", advice.evidence)[0]) * MS
    assert advice.saves_ns_per_step <= removable * 1.01


def waiting(run: Run, begun: int) -> Run:
    """Four steps of 10 ms whose host waits from 1 to 7 ms; what it launched before begins at ``begun``."""
    run.steps(4, 10 * MS)
    for at in range(0, 40 * MS, 10 * MS):
        run.launches("aten::mm", at, at + 20 * US, ("gemm_bf16", at + begun, at + begun + 100 * US))
        run.host("aten::item", at + MS, at + 7 * MS)
        run.call("cudaStreamSynchronize", at + MS, at + 7 * MS)
        run.launches("aten::mm", at + 7 * MS, at + 7020 * US, ("gemm_bf16", at + 7030 * US, at + 9 * MS))
    return run


def test_wait_behind_a_blocked_queue_is_not_the_cause() -> None:
    assert "needless-synchronisation" in waiting(Run(), 30 * US).advice()
    blocked = waiting(Run(), 6800 * US)
    assert "needless-synchronisation" not in blocked.advice()


def test_waits_of_inference_are_not_of_a_loss() -> None:
    assert "loss.item()" in waiting(Run().trains(), 30 * US).advice()["needless-synchronisation"].setting
    setting = waiting(Run(), 30 * US).advice()["needless-synchronisation"].setting
    assert "loss" not in setting


def test_cold_start_is_said_and_not_advised_on() -> None:
    run = late_host(steps=1)
    assert run.advice() == {}
    run.host("aten::conv2d", 4 * MS, 504 * MS)
    run.launches("aten::conv2d", 505 * MS, 505 * MS + 90 * US, ("gemm_bf16", 506 * MS, 507 * MS))
    run.events = [each for each in run.events if "ProfilerStep" not in each]
    assert run.advice() == {}
    assert any("cold start: 500 ms" in line and "aten::conv2d" in line for line in run.notes())


@pytest.mark.parametrize("name", ["Lazy Function Loading", "Runtime Triggered Module Loading"])
def test_code_loaded_at_its_first_use_is_a_cold_start(name: str) -> None:
    run = late_host()
    run.host(name, MS, 8 * MS, "overhead")
    assert "tiny-kernels" not in run.advice()


def test_first_call_that_waits_for_the_device_is_no_cold_start() -> None:
    run = waiting(Run(), 30 * US)
    assert not any("cold start" in line for line in run.notes())


def test_full_launch_queue_shows_that_the_device_decides() -> None:
    run = waiting(Run(), 30 * US)
    for at in range(0, 40 * MS, 10 * MS):
        run.host("Command Buffer Full", at + 200 * US, at + 7 * MS, "overhead")
    assert "needless-synchronisation" not in run.advice()
    assert any("for a full launch queue" in line for line in run.notes())


def with_memory(run: Run, reserved: int) -> Run:
    instant = {"Bytes": 1, "Device Type": 1, "Total Reserved": reserved}
    event = traces.event("[memory]", 0, 0, cat="cpu_instant_event", args=instant)
    run.events.append(event.replace('"ph": "X"', '"ph": "i"'))
    run.facts["deviceProperties"] = [{"totalGlobalMem": 100, "computeMajor": 9}]
    return run


def test_full_memory_of_a_server_is_by_design() -> None:
    assert "memory-near-full" in with_memory(products(Run().trains()), 95).advice()
    assert "memory-near-full" not in with_memory(products(Run()), 95).advice()


def test_segments_grow_only_where_the_allocator_can() -> None:
    cuda, rocm = Run().trains(), Run("cuda_runtime", "hipLaunchKernel").trains()
    for run, call in ((cuda, "cudaLaunchKernel"), (rocm, "hipLaunchKernel")):
        run.call(call, 0, US)
    settings = [with_memory(products(run), 95).advice()["memory-near-full"].setting for run in (cuda, rocm)]
    assert ["expandable_segments" in setting for setting in settings] == [True, False]


def test_results_copied_to_pageable_memory_want_pinned_memory() -> None:
    run = Run().steps(4, 4 * MS)
    for at in range(0, 16 * MS, 4 * MS):
        run.launches("aten::mm", at, at + 20 * US, ("gemm_bf16", at + 30 * US, at + 2 * MS))
        copy = ("Memcpy DtoH (Device -> Pageable)", at + 2 * MS, at + 3 * MS)
        run.launches("aten::copy_", at + 30 * US, at + 3 * MS, copy, cat="gpu_memcpy")
    advice = run.advice()["pin-results"]
    assert advice.saves_ns_per_step == pytest.approx(MS / 2)
    assert "pin_memory=True" in advice.setting


def test_gloo_is_replaced_by_the_devices_own_backend() -> None:
    for category, launch, backend in (
        ("cuda_runtime", "cudaLaunchKernel", "nccl"),
        ("xpu_runtime", "urEnqueueKernelLaunch", "xccl"),
        ("mtia_runtime", "mtiaLaunch", ""),
    ):
        run = waiting(Run(category, launch), 30 * US)
        for at in range(0, 40 * MS, 10 * MS):
            run.annotate("gloo:all_reduce", at + MS, at + 7 * MS)
        found = run.advice().get("backend")
        assert (found is not None) is bool(backend)
        assert found is None or f'"{backend}"' in found.setting


@pytest.mark.parametrize("frame", ["threading.py(1002): _bootstrap", "torch/profiler/profiler.py(7): step"])
def test_place_is_never_a_tools_frame(frame: str) -> None:
    run = waiting(Run(), 30 * US)
    run.host("train.py(3): step", 0, 40 * MS, "python_function")
    run.host(frame, 500 * US, 40 * MS, "python_function")
    found = some(run.summary().idle)
    places = {place.where for cause in found.causes for place in cause.places}
    assert "train.py(3): step" in places
    assert frame not in places
