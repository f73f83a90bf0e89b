"""Every second of a profile lands in the class that it belongs to."""

import pytest
from benchmarks.kernel_time import (
    ATTENTION,
    COLLECTIVES,
    DEVICE_COPIES,
    ELEMENTWISE,
    GATHER,
    HEAD,
    HOST_COPIES,
    IDLE,
    MATMUL,
    OPTIMIZER,
    OTHER,
    kernel_class,
    seconds_by_class,
)
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

KERNELS = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": MATMUL,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)": MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(cublasSplitKParams<float>)": MATMUL,
    "triton_tem_fused_mm_3": MATMUL,
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128>>": ATTENTION,
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>": (
        ATTENTION
    ),
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor0000o1110": (
        ATTENTION
    ),
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)": ATTENTION,
    "void at::native::vectorized_gather_kernel<16, int>(char*, char*, int*, int, long, long, long, long)": GATHER,
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, int, unsigned int, 2>": GATHER,
    "triton_poi_fused__to_copy_cat_mul_neg_slice_5": ELEMENTWISE,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": ELEMENTWISE,
    "cross_entropy_bwd_kernel": HEAD,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": OPTIMIZER,
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COLLECTIVES,
    "Memcpy HtoD (Pageable -> Device)": HOST_COPIES,
    "Memcpy DtoD (Device -> Device)": DEVICE_COPIES,
    "somebodys_new_kernel": OTHER,
}


def kernel(name: str, start: float, end: float) -> FunctionEvent:
    on_gpu = DeviceType.CUDA
    return FunctionEvent(id=0, name=name, thread=0, start_us=start, end_us=end, use_device="cuda", device_type=on_gpu)


def test_a_kernel_of_a_gpu_is_counted_in_its_class() -> None:
    assert {name: kernel_class(name) for name in KERNELS} == KERNELS


def test_idle_time_is_that_in_which_no_stream_ran() -> None:
    events = [
        kernel("nvjet_tst_a", 100, 200),
        kernel("ncclDevKernel_AllGather", 150, 300),
        kernel("nvjet_tst_b", 210, 220),
        kernel("flash_fwd_kernel", 350, 400),
    ]
    found = seconds_by_class(events)
    expected = {COLLECTIVES: 150e-6, MATMUL: 110e-6, ATTENTION: 50e-6, IDLE: 50e-6}
    assert found == pytest.approx(expected)
