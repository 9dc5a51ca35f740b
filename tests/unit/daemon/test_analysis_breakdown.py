"""The breakdown of device time, and the kernels that count as communication."""

import re
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.daemon import traces
from tests.unit.daemon.traces import event, trace_of

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.breakdown import communicates
from torchperfd_daemon.errors import UsageError

# One event on a device: category, name, start, end, correlation, process group.
Device = tuple[str, str, int, int, int | None, str | None]
PATTERN = re.compile(r"nccl|rccl|hccl|multimem|symm_mem|deep_ep|::ep::|nvshmem|cross_device_reduce")
_PARTS = "window busy compute comm memcpy exposed_comm exposed_memcpy overlap idle"
KEYS = tuple(f"{part}_us" for part in _PARTS.split())


def kind(event: Device) -> str:
    category, name, *_, group = event
    if category in ("gpu_memcpy", "Memcpy"):
        return "memcpy"
    if category in ("kernel", "Kernel") and (group or PATTERN.search(name)):
        return "comm"
    return "compute"


def sweep(events: list[Device], window: tuple[int, int] | None = None) -> dict[str, int]:
    """Look at each stretch between two neighbouring edges, and at what runs in it."""
    found: defaultdict[str, int] = defaultdict(int)
    if not events and window is None:
        return dict.fromkeys(KEYS, 0)
    first, last = window or (min(each[2] for each in events), max(each[3] for each in events))
    edges = sorted({first, last, *(edge for each in events for edge in each[2:4] if first < edge < last)})
    for start, end in pairwise(edges):
        running = {kind(each) for each in events if each[2] <= start and end <= each[3]}
        length = end - start
        found["window_us"] += length
        found["busy_us" if running else "idle_us"] += length
        for what in running:
            found[f"{what}_us"] += length
        if "comm" in running:
            found["overlap_us" if "compute" in running else "exposed_comm_us"] += length
        if running == {"memcpy"}:
            found["exposed_memcpy_us"] += length
    return {key: found[key] for key in KEYS}


def ours(entry: dict[str, Any]) -> dict[str, int]:
    return {key: round(entry[key] * 1000) for key in KEYS}


def rank_of(events: list[Device], launches: list[tuple[str, int]], *steps: tuple[int, int]) -> dict[str, Any]:
    # The recording lasts as long as any of the events: what starts far outside of one is left out.
    text = [traces.event("aten::add", 0, 1), traces.event("aten::mul", 0, 1 << 51, thread=2)]
    for category, name, start, end, correlation, group in events:
        args: dict[str, Any] = {} if correlation is None else {"correlation": correlation}
        args |= {} if group is None else {"Process Group Name": group}
        text.append(traces.event(name, start, end, cat=category, thread=7, args=args))
    text += [traces.event("launch", 0, 1, cat=cat, args={"correlation": number}) for cat, number in launches]
    text += [
        traces.event(f"ProfilerStep#{number}", start, end, cat="user_annotation")
        for number, (start, end) in enumerate(steps)
    ]
    return analysis.to_dict(analysis.summarise(traces.trace_of(text)), None)


LAUNCH = ("cuda_runtime", 0)
LAUNCHES = ["cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "cpu_op"]
NAMES = [
    "gemm",
    "ncclDevKernel_AllReduce",
    "void multimem_all_reduce",
    "deep_ep::intranode::dispatch",
    "vllm::cross_device_reduce_1stage",
    "a::ep::b",
]


@st.composite
def device_events(draw: st.DrawFn) -> list[Device]:
    one = st.tuples(
        st.sampled_from(["kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset"]),
        st.sampled_from(NAMES),
        st.integers(1, 60) | st.integers(1, 1 << 50),
        st.integers(0, 30) | st.integers(0, 1 << 40),
        st.none() | st.integers(0, 6),
        st.none() | st.sampled_from(["", "0", "tp"]),
    )
    events = draw(st.lists(one, max_size=14))
    return [(cat, name, start, start + length, *rest) for cat, name, start, length, *rest in events]


@given(
    device_events(),
    st.lists(
        st.tuples(
            st.sampled_from(LAUNCHES),
            st.integers(0, 6),
        ),
        max_size=4,
    ),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=3),
)
@example(
    [*[("kernel", "gemm", 1, 1, None, None)] * 13, ("kernel", "gemm", 1, 3, 0, None)], [LAUNCH], [(0, 1)]
)
def test_the_breakdown_is_that_of_a_sweep(
    events: list[Device], launches: list[tuple[str, int]], steps: list[tuple[int, int]]
) -> None:
    windows = [(start, start + length) for start, length in steps]
    rank = rank_of(events, launches, *windows)
    assert ours(rank["breakdown"]["all"]) == sweep(events)
    assert rank["breakdown"]["all"]["n_gpu_events"] == len(events)
    launched = {number for category, number in launches if category != "cpu_op"}
    linked = [each for each in events if each[4] in launched]
    assert ours(rank["breakdown"]["linked"]) == sweep(linked)
    assert rank["breakdown"]["linked"]["n_gpu_events"] == len(linked)
    by_step = {step["index"]: step for step in rank["steps"]}
    for number, window in enumerate(windows):
        step = by_step[number]
        if rank["steps_from"]["timed_by"] == "device":  # its work outlasts what the host marks
            window = round(1000 * step["start_us"]), round(1000 * (step["start_us"] + step["duration_us"]))
        assert ours(step["breakdown"]) == sweep(events, window)


def test_breakdown_kernels_without_duration_are_no_failure() -> None:
    """All as short as the clock: no stream has any kernel time."""
    still = ("kernel", "gemm", 1, 1)
    rank = rank_of([(*still, None, None)] * 5 + [(*still, 0, None)], [("cuda_runtime", 0)], (0, 1))
    assert rank["breakdown"]["linked"]["n_gpu_events"] == 1


@given(device_events())
def test_the_kernels_are_summed_by_name(events: list[Device]) -> None:
    sums: defaultdict[str, list[int]] = defaultdict(list)
    for category, name, start, end, *_ in events:
        if category.lower() == "kernel":
            sums[name].append(end - start)
    kernels = rank_of(events, [])["kernels"]
    assert {kernel["name"]: round(kernel["sum_us"] * 1000) for kernel in kernels} == {
        name: sum(durations) for name, durations in sums.items()
    }
    assert {kernel["name"]: kernel["calls"] for kernel in kernels} == {
        name: len(durations) for name, durations in sums.items()
    }
    assert [kernel["sum_us"] for kernel in kernels] == sorted(
        (kernel["sum_us"] for kernel in kernels), reverse=True
    )
    for kernel in kernels:
        assert kernel["mean_us"] == pytest.approx(kernel["sum_us"] / kernel["calls"])


def test_overlap_is_the_communication_hidden_by_compute() -> None:
    rank = rank_of([("kernel", "ncclA", 10, 50, None, None), ("kernel", "gemm", 40, 90, None, None)], [])
    assert rank["breakdown"]["all"]["comm_comp_overlap_pct"] == 25.0
    assert rank_of([], [])["breakdown"]["all"]["comm_comp_overlap_pct"] == 0.0


def test_communication_can_be_named() -> None:
    trace = traces.trace_of([traces.event("my_own_reduce", 0, 10, cat="kernel")])
    assert analysis.summarise(trace).breakdown.comm_ns == 0
    assert analysis.summarise(trace, comm_pattern="own_.*ce$").breakdown.comm_ns == 10
    with pytest.raises(UsageError, match="is no regular expression"):
        analysis.summarise(trace, comm_pattern="(")


COMMUNICATION = (
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_AllReduce_RING_LL_Sum_half(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs)",
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
    "rcclGenericKernel(rcclArgs)",
    "mscclKernel_Sum_half_LL(ncclDevComm*)",
    "void mscclpp::collective::allreduceAllpairPacket<float>(float*)",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
    "void sglang::cross_device_reduce_2stage<__half, 8>(sglang::RankData*)",
    "void aiter::cross_device_reduce_2stage_naive<__hip_bfloat16, 8>(aiter::RankData*)",
    "void aiter::reduce_scatter_cross_device_store<float, 8>(float*)",
    "void aiter::allgather_vec<8>(float*)",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<3, __half, 4>(p)",
    "allreduce_fusion_kernel_twoshot_sync<2>(p)",
    "ar_fusion::moe::moefinalize_allreduce_fusion_kernel_oneshot_lamport<bf16,8,false,true>",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>(tensorrt_llm::kernels::AllReduceParams)",
    "tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8>(p)",
    "void flashinfer::trtllm_alltoall::moeAllToAllKernel<int>(p)",
    "void quickreduce::allreduce_prototype_twoshot<4>(p)",
    "void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16>(p)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>(p)",
    "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*)",
    "multimem_one_shot_all_reduce_kernel<bf16>",
    "void c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**)",
    "oneccl_reduce_base<float, 2, 16, 1, 1, 2>",
    "oneccl_allreduce_pcie<bf16>",
    "userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(p)",
    "kuserbuffers_pushsend(int*)",
    "nvshmemi_transfer_rma_p<int>",
    "void deep_ep::internode_ll::dispatch<true, 7168>(p)",
    "void primus_turbo::deep_ep::intranode::cached_notify_dispatch<8>(int const*)",
    "EpDispatchInterNodeV1KernelLowLatency_bf16",
    "void mori::moe::EpCombineIntraNodeKernel<__hip_bfloat16>(p)",
    "hcom_allReduce__503_96_4",
    "hcom_reduceScatter_AicpuKernel_503_490_1",
    "mcclKernel_AllReduce",
    "one_shot_all_reduce_kernel_optimized",
)
COMPUTE = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::sum_functor>>(p)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<float>(p)",
    "void at::native::scatter_reduce_kernel<float>(p)",
    "void at::native::vectorized_gather_kernel<16, long>(char*)",
    "void cub::CUB_200_NS::DeviceReduceKernel<cub::Policy600>(float*)",
    "void cub::DeviceSegmentedReduceKernel<int>(int*)",
    "void cublasLt::splitKreduce_kernel<32, 16, int>(cublasLt::cublasSplitKParams)",
    "triton_poi_fused_all_reduce_0",
    "triton_red_fused_add_all_reduce_native_layer_norm_wait_tensor_1",
    "triton_per_fused_all_gather_into_tensor_sum_3",
    "triton_poi_fused_reduce_scatter_tensor_wait_tensor_7",
    "void blockAllReduce<float>(float*)",
    "void layer_norm_warp_all_reduce<4>(float*)",
    "helion_gemm_one_shot_all_reduce_kernel",
    "aclnnMatmulAllReduce_MatmulAllReduce",
    "void fsdp_all_gather_copy_in<float>(float*)",
    "step_dispatch_kernel",
    "void at::native::modern::elementwise_kernel_with_index<long>(p)",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)",
    "moe_align_block_size_kernel",
    "success_lookup_kernel",
    "Memset (Device)",
)


@pytest.mark.parametrize("name", COMMUNICATION)
def test_communicates_kernel_of_a_library_is_true(name: str) -> None:
    assert communicates()(name)


@pytest.mark.parametrize("name", COMPUTE)
def test_communicates_compute_kernel_is_false(name: str) -> None:
    assert not communicates()(name)


def test_communicates_further_pattern_adds_names() -> None:
    assert communicates("moe_align")("moe_align_block_size_kernel")
    assert communicates("moe_align")("ncclDevKernel_AllReduce")
    assert not communicates("moe_align")("sgemm")


def test_breakdown_known_comm_kernels_are_communication() -> None:
    """Twelve names in use, each 10 µs: comm 120 µs, compute none."""
    twelve = COMMUNICATION[:2] + COMMUNICATION[7:8] + COMMUNICATION[12:16] + COMMUNICATION[18:23]
    device = analysis.DeviceTime(
        trace_of(
            event(name, at * 100_000, at * 100_000 + 10_000, cat="kernel", thread=7)
            for at, name in enumerate(twelve)
        )
    ).all()
    assert (device.n_gpu_events, device.comm_ns, device.compute_ns) == (12, 120_000, 0)
