"""Every second of a profile lands in the class that it belongs to, and what has none is named."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.device_time import BATCH, HEAD_MARK, INPUTS, OPTIMIZER_MARK, STEP, read_profile
from benchmarks.kernel_classes import (
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
)
from plot_profile import draw, read_bars
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

SCRIPTS = Path(__file__).parents[2] / "scripts"

KERNELS = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": MATMUL,
    "nvjet_tst_64x24_64x16_4x1_v_bz_splitK_TNT": MATMUL,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off": MATMUL,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)": MATMUL,
    "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn": MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(cublasSplitKParams<float>)": MATMUL,
    "triton_tem_fused_mm_3": MATMUL,
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>": ATTENTION,
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128>>": ATTENTION,
    "void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<(int)128>>": ATTENTION,
    "void flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<(int)128>>": ATTENTION,
    "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>": ATTENTION,
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>": (
        ATTENTION
    ),
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor0000o1110": (
        ATTENTION
    ),
    "flash_fwd_sm100_bf16_head_dim128_tile128x128_threads384_causal_kernel_cutlass_kernel_flash_attncute": ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128_4x1x1_kernel0_0": ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)": ATTENTION,
    "_sum_readers_kernel": GATHER,
    "void at::native::vectorized_gather_kernel<16, int>(char*, char*, int*, int, long, long, long, long)": GATHER,
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, int, unsigned int, 2>": GATHER,
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>": GATHER,
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16, float, long>": GATHER,
    "triton_poi_fused__to_copy_cat_mul_neg_slice_5": ELEMENTWISE,
    "triton_red_fused__to_copy_embedding_mean_mul_pow_rsqrt_0": ELEMENTWISE,
    "triton_per_fused_index_select_sum_2": ELEMENTWISE,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": ELEMENTWISE,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>": ELEMENTWISE,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>>": ELEMENTWISE,
    "cross_entropy_bwd_kernel": HEAD,
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>": HEAD,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": OPTIMIZER,
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COLLECTIVES,
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COLLECTIVES,
    "Memcpy HtoD (Pageable -> Device)": HOST_COPIES,
    "Memcpy DtoH (Device -> Pageable)": HOST_COPIES,
    "Memcpy DtoD (Device -> Device)": DEVICE_COPIES,
    "Memset (Device)": DEVICE_COPIES,
    "void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast_kernel": DEVICE_COPIES,
    "somebodys_new_kernel": OTHER,
}


@pytest.mark.parametrize(("name", "expected"), KERNELS.items(), ids=[name[:40] for name in KERNELS])
def test_a_kernel_of_a_gpu_is_counted_in_its_class(name: str, expected: str) -> None:
    assert kernel_class(name) == expected


def host(name: str, start: float, end: float, **more: object) -> FunctionEvent:
    mark = name.startswith("profile_actor/")
    return FunctionEvent(
        id=0, name=name, thread=1, start_us=start, end_us=end, use_device="cuda", is_user_annotation=mark, **more
    )


def device(name: str, start: float, end: float, launched_by: FunctionEvent, annotation: bool = False) -> FunctionEvent:
    launched_by.append_kernel(name, 0, end - start)
    return FunctionEvent(
        id=0,
        name=name,
        thread=0,
        start_us=start,
        end_us=end,
        use_device="cuda",
        device_type=DeviceType.CUDA,
        is_user_annotation=annotation,
    )


def test_head_optimizer_and_idle_seconds_of_a_gpus_timeline_are_told_apart() -> None:
    """Two micro-batches: kernels at 100-200 and 200-350, a head at 350-400 and its backward at 600-700."""
    batch, optimizer = host(BATCH, 0, 900), host(OPTIMIZER_MARK, 900, 1000)
    first, second = host(STEP, 50, 300), host(STEP, 450, 500)
    inputs = [host(INPUTS, 60, 90), host(INPUTS, 455, 460)]
    mm, head = host("aten::mm", 95, 99), host(HEAD_MARK, 200, 280)
    head_mm = host("aten::mm", 210, 220, sequence_nr=7)
    backward = host("MmBackward0", 320, 400, sequence_nr=7, fwd_thread=1, scope=1)
    elsewhere = host("MmBackward0", 401, 402, sequence_nr=7, fwd_thread=2, scope=1)  # another thread's seventh node
    step = host("aten::_fused_adamw_", 910, 990)
    head.append_cpu_child(head_mm)
    optimizer.append_cpu_child(step)
    on_device = [
        device("nvjet_tst_a", 100, 200, mm),
        device("flash_fwd_kernel", 200, 350, mm),
        device("nvjet_tst_b", 350, 400, head_mm),
        device(HEAD_MARK, 350, 400, head, annotation=True),
        device("nvjet_tst_c", 600, 700, backward),
        device("nvjet_tst_d", 700, 720, elsewhere),
        device("ncclDevKernel_AllGather", 600, 640, step),
        device("multi_tensor_apply_kernel", 950, 1050, step),
        device("elementwise_kernel", 1050, 1060, step),
        device("somebodys_new_kernel", 720, 730, mm),
    ]
    on_host = [batch, first, *inputs, mm, head, head_mm, backward, elsewhere, second, optimizer, step]
    found = read_profile([*on_host, *on_device], on_gpu=True)

    def in_us(seconds: dict[str, float]) -> dict[str, float]:
        return {name: value * 1e6 for name, value in seconds.items() if value > 1e-12}

    assert found.wall == pytest.approx(1060e-6)
    assert in_us(found.classes) == pytest.approx(
        {MATMUL: 120, ATTENTION: 150, HEAD: 150, OPTIMIZER: 110, COLLECTIVES: 40, OTHER: 10, IDLE: 520}
    )
    # The collective ran beside a matrix product, everything else alone.
    assert sum(found.classes.values()) == pytest.approx(found.wall + 40e-6)
    assert in_us(found.idle) == pytest.approx(
        {
            "planning": 50,
            "inputs of micro-batches": 40 + 10,
            "forward": 10 + 40,
            "backward": 50 + 100 + 170,
            "optimizer": 50,
        }
    )
    assert found.unnamed == pytest.approx({"somebodys_new_kernel": 10e-6})
    assert found.micro_batches == 2


def test_a_profile_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="0 batches in the profile"):
        read_profile([host("aten::mm", 0, 1)], on_gpu=False)


def test_a_rehearsal_on_the_cpu_fills_the_table_and_the_picture(tmp_path: Path) -> None:
    table, picture = tmp_path / "profile.csv", tmp_path / "profile.png"
    command = [str(SCRIPTS / "profile_actor.py"), "--layers", "1", "--cases", "96,16,4", "--paths", "packed"]
    result = subprocess.run(
        [sys.executable, *command, "--warmup", "1", "--csv", str(table)], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr[-2000:]
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    shares = {row["name"]: float(row["share"]) for row in rows if row["kind"] == "device"}
    # Nothing is counted twice; collectives alone run in a thread of their own, beside the rest.
    assert 1 - 1e-6 < sum(shares.values()) < 1 + 1e-3 + shares.get(COLLECTIVES, 0)
    assert min(shares[name] for name in (MATMUL, ATTENTION, GATHER, ELEMENTWISE, HEAD, OPTIMIZER, IDLE)) > 0
    idle = sum(float(row["share"]) for row in rows if row["kind"] == "idle")
    assert idle == pytest.approx(shares[IDLE], abs=1e-6)
    assert any(row["kind"] == "host" and row["name"] == "planning" and float(row["seconds"]) > 0 for row in rows)

    twice = [*rows, *({**row, "kernel": "another", "seconds_wall": "9"} for row in rows)]
    assert [(bar.kernel, bar.wall) for bar in read_bars(twice)] == [
        (rows[0]["kernel"], float(rows[0]["seconds_wall"])),
        ("another", 9.0),
    ]
    draw(read_bars(twice), "rehearsal", picture)
    assert picture.stat().st_size > 10_000
    with pytest.raises(ValueError, match="no row of kind device"):
        read_bars([row for row in rows if row["kind"] == "host"])
