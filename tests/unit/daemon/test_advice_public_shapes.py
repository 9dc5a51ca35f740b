"""Shapes of public traces that once got advice which could not be followed, rebuilt small."""

import pytest
from tests.support.advice_invariants import violations
from tests.support.runs import MS, US, Run
from tests.support.values import some


def test_profilers_own_work_is_named_and_promised_to_no_one() -> None:
    """kineto#1020: a request for another buffer lasts 2.9 of the 3 ms of each second launch."""
    run = Run().steps(5, 4 * MS)
    for at in range(0, 20 * MS, 4 * MS):
        run.launches("aten::mm", at + 10 * US, at + 50 * US, ("gemm", at + 60 * US, at + 360 * US))
        run.launches("aten::mm", at + 100 * US, at + 3100 * US, ("gemm", at + 3110 * US, at + 3900 * US))
        run.host("Activity Buffer Request", at + 120 * US, at + 3020 * US, "overhead")
    assert run.advice() == {}
    assert any("profiler's own work took 14.5 ms" in line and "2.9 ms a step" in line for line in run.notes())
    assert max(some(run.summary().idle).causes, key=lambda cause: cause.ns).cause == "profiler"


def test_sharded_half_precision_exchange_is_not_compressed() -> None:
    """modded-nanogpt: its own optimizer scatters and gathers bfloat16, without DDP."""
    run = Run().steps(6, 12 * MS).trains()
    for at in range(0, 72 * MS, 12 * MS):
        run.launches("aten::mm", at + 10 * US, at + 30 * US, ("nvjet_tst", at + 40 * US, at + 6 * MS))
        run.annotate("Optimizer.step#DistAdam.step", at + 100 * US, at + 11 * MS)
        for number, kind in enumerate(("_reduce_scatter_base", "_allgather_base")):
            begin = at + (6 + 2 * number) * MS
            kernel = ("ncclDevKernel_Op_RING_LL", begin, begin + 2 * MS)
            described = {"Collective name": kind, "dtype": "BFloat16"}
            run.launches(f"c10d::{kind}_", at + 200 * US, at + 250 * US, kernel, stream=20, **described)
    found = run.advice()
    assert set(found) == {"exposed-communication"}
    advice = found["exposed-communication"]
    assert "async_op=True" in advice.setting
    assert "hook" not in advice.setting
    assert "bfloat16" in advice.evidence
    assert advice.saves_ns_per_step == pytest.approx(2 * MS)


@pytest.mark.parametrize("late", [5 * US, 60 * US])
def test_exchange_that_begins_soon_after_its_input_is_explained(late: int) -> None:
    """Its stream is signalled some time after the last product, which holds it up."""
    run = Run().steps(6, 10 * MS).trains()
    for at in range(0, 60 * MS, 10 * MS):
        run.launches("aten::mm", at + 10 * US, at + 30 * US, ("nvjet_tst", at + 40 * US, at + 5040 * US))
        begin = at + 5040 * US + late
        kernel = ("ncclDevKernel_AllGather_bf16", begin, begin + 4 * MS)
        described = {"Collective name": "_allgather_base", "dtype": "BFloat16"}
        run.launches("c10d::_allgather_base_", at + 200 * US, at + 250 * US, kernel, stream=20, **described)
    advice = run.advice()["exposed-communication"]
    assert advice.saves_ns_per_step == pytest.approx(2 * MS)
    assert advice.margin_ns == 0


def test_optimizer_of_ones_own_gets_no_option_of_torchs() -> None:
    """modded-nanogpt's NorMuon: 120 small operators a step."""
    run = Run().steps(5, 9 * MS).trains()
    for at in range(0, 45 * MS, 9 * MS):
        run.annotate("Optimizer.step#NorMuon.step", at + 100 * US, at + 8 * MS)
        for number in range(120):
            start = at + 120 * US + number * 60 * US
            run.launches("aten::lerp_", start, start + 50 * US, ("lerp", start + 51 * US, start + 56 * US))
    found = run.advice()
    assert "fused-optimizer" not in found
    advice = found["compiled-optimizer"]
    assert "NorMuon(" not in advice.setting
    assert "torch.compile" in advice.setting
    assert "torch._foreach_" in advice.setting


def test_graph_capture_loses_no_launch_and_gets_no_idle_advice() -> None:
    """vLLM and SGLang record their captures: of 301 launches one has a kernel."""
    run = Run()
    run.launches("aten::mul", 0, 20 * US, ("mul", 30 * US, 40 * US))
    run.call("cudaStreamBeginCapture_v10000", 50 * US, 60 * US)
    for at in range(1, 300):
        run.launches("aten::mul", at * 60 * US + 10 * US, at * 60 * US + 60 * US, None)
    run.call("cudaStreamEndCapture_v10000", 18_010 * US, 18_020 * US)
    run.launches("aten::mul", 18_100 * US, 18_120 * US, ("mul", 18_130 * US, 18_140 * US))
    assert run.advice() == {}
    summary = run.summary()
    assert (summary.quality.launches_without_kernels, summary.quality.launches_captured) == (0, 299)
    assert not any("lost" in line for line in run.notes())
    assert any("written into a CUDA graph: 299" in line for line in run.notes())
    assert list(violations(summary)) == []


def test_queue_blocked_from_the_start_is_not_the_fault_of_a_wait() -> None:
    """SGLang's decode: what was launched at 0.1 ms begins at 400 ms, behind something the file lacks."""
    run = Run()
    run.launches("aten::mul", 0, 20 * US, ("mul", 30 * US, 40 * US), stream=8)
    for at in range(5):
        launched = (at + 1) * 100 * US
        begin = 400 * MS + at * 50 * US
        run.launches("aten::mul", launched, launched + 20 * US, ("mul", begin, begin + 50 * US))
    run.host("aten::copy_", MS, 400_260 * US)
    run.call("hipMemcpyWithStream", MS, 400_260 * US)
    run.launches("aten::mul", 400_270 * US, 400_290 * US, ("mul", 400_300 * US, 400_310 * US))
    assert run.advice() == {}
    assert max(some(run.summary().idle).causes, key=lambda cause: cause.ns).cause == "other"


def test_idle_time_is_never_more_than_the_recording() -> None:
    """Recording costs more than the gaps: the step is shortened by it, and so are the gaps."""
    run = Run()
    for at in range(4000):
        run.host("aten::slice", at * 5 * US, at * 5 * US + 4 * US)
    run.launches("aten::mul", 0, 4 * US, ("mul", 5 * US, 10 * US))
    run.launches("aten::normal_", 19 * MS, 20 * MS, ("mul", 20 * MS, 20_010 * US))
    assert list(violations(run.summary())) == []


def test_custom_all_reduces_are_collectives_of_their_own() -> None:
    """TraceLens#547: vLLM's kernel has no arguments, so ranks are matched by the order of the stream."""
    run = Run()
    name = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)"
    for at in range(0, 4 * MS, MS):
        run.launches("vllm::all_reduce", at, at + 20 * US, (name, at + 30 * US, at + 90 * US))
        run.launches("aten::mm", at + 30 * US, at + 50 * US, ("gemm", at + 90 * US, at + 95 * US))
    found = run.summary().collectives
    assert len(found) == 4
    assert {kind.name for kind in found.kinds} == {"all_reduce"}
