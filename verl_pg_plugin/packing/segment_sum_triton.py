"""Triton kernel of the segment sum; imported only where Triton is installed.

A histogram with weights: a program reads one row, or one chunk of it, and adds every token to the sum of the segment
its id names, by comparing the id with all segments. The tile of partial sums is laid out with the tokens along the
threads, so all of that stays in a thread's registers, and no atomic add makes the result depend on timing.

Shape suffixes: S segments (padded to a power of two), T tokens of one step.
"""

import torch
import triton
import triton.language as tl

# Measured on an H200 at 128 x 8192 tokens and 32 segments: 7.6 us a call, against 11.3 with 256 tokens a step and
# 12.5 with rows cut in two.
NUM_WARPS = 8
NUM_STAGES = 4
MAX_BLOCK_T = 1024
MAX_TILE = 32 * MAX_BLOCK_T
# Rows are cut into chunks only while this leaves every program this many tokens.
MIN_CHUNK = 8192


def tokens_per_step(num_segments: int) -> int:
    """The tile of partial sums has a register a segment and token, so more segments take fewer tokens a step."""
    return min(MAX_BLOCK_T, MAX_TILE // triton.next_power_of_2(num_segments))


def launch_segment_sum(
    values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; no synchronisation and no atomics, so the sums are the same in every run.

    Args:
        values: (bs, seq) floating, on a GPU.
        segment_ids: (bs, seq) integer, on the same GPU. Ids out of range are skipped and reported.
        num_segments: at most a few dozen; every one costs registers.

    Returns:
        (bs, num_segments) sums of `values`' dtype, accumulated in float32 or wider, and an int32 vector with a
        non-zero entry where a program met an id out of range: unless it is all zero, the sums must not be used.
    """
    values, segment_ids = _rows_contiguous(values), _rows_contiguous(segment_ids)
    bs, seq = values.shape
    num_chunks = _num_chunks(bs, seq, values.device)
    block_t = tokens_per_step(num_segments)
    chunk = triton.cdiv(triton.cdiv(seq, num_chunks), block_t) * block_t
    num_chunks = triton.cdiv(seq, chunk)
    sum_dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    partial = values.new_empty((bs, num_chunks, num_segments), dtype=sum_dtype)
    has_bad_id = values.new_empty(bs * num_chunks, dtype=torch.int32)
    _segment_sum_kernel[(bs, num_chunks)](
        values,
        segment_ids,
        partial,
        has_bad_id,
        seq,
        chunk,
        num_segments,
        values.stride(0),
        segment_ids.stride(0),
        SUM_DTYPE=tl.float64 if sum_dtype == torch.float64 else tl.float32,
        BLOCK_S=triton.next_power_of_2(num_segments),
        BLOCK_T=block_t,
        NUM_STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
    )
    sums = partial[:, 0] if num_chunks == 1 else partial.sum(dim=1)
    return sums.to(values.dtype), has_bad_id


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _num_chunks(bs: int, seq: int, device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter, which runs one program after the other
        return max(1, min(2, seq // MIN_CHUNK))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(num_sms // bs, seq // MIN_CHUNK))


@triton.jit
def _segment_sum_kernel(
    values_ptr,
    ids_ptr,
    partial_ptr,
    has_bad_id_ptr,
    seq,
    chunk,
    num_segments,
    values_stride,
    ids_stride,
    SUM_DTYPE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    program = row * tl.num_programs(1) + tl.program_id(1)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, seq)
    segment_S = tl.arange(0, BLOCK_S)
    sum_ST = tl.zeros((BLOCK_S, BLOCK_T), SUM_DTYPE)
    bad_T = tl.zeros((BLOCK_T,), tl.int32)
    for start in tl.range(first, last, BLOCK_T, num_stages=NUM_STAGES):
        token_T = start + tl.arange(0, BLOCK_T)
        inside_T = token_T < last
        id_T = tl.load(ids_ptr + row * ids_stride + token_T, mask=inside_T, other=0)
        value_T = tl.load(values_ptr + row * values_stride + token_T, mask=inside_T, other=0.0).to(SUM_DTYPE)
        bad_T |= ((id_T < 0) | (id_T >= num_segments)).to(tl.int32)
        # Selected, not multiplied by 0 or 1: an inf or nan must stay in its own segment.
        is_own_ST = segment_S[:, None] == id_T.to(tl.int32)[None, :]
        sum_ST = tl.where(is_own_ST, sum_ST + value_T[None, :], sum_ST)
    tl.store(has_bad_id_ptr + program, tl.max(bad_T, axis=0))
    sum_S = tl.sum(sum_ST, axis=1)
    tl.store(partial_ptr + program * num_segments + segment_S, sum_S, mask=segment_S < num_segments)
