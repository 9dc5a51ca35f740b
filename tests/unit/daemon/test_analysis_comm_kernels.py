"""Communication kernels by name. The names are those of kernels in the libraries' public sources."""

import pytest
from tests.unit.daemon.traces import event, trace_of

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.breakdown import communicates

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
