"""Sum, in float32 and in a fixed order, the gradients of all places a row was gathered to (CUDA, Triton)."""

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_readers_kernel(
    grad_ptr,
    total_ptr,
    row_segment_ptr,
    place_ptr,
    reader_bounds_ptr,
    reader_starts_ptr,
    grad_row_stride,
    grad_head_stride,
    total_row_stride,
    total_head_stride,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """One program per row: add its copies, one in each reader of its segment, in the order of the readers."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.load(row_segment_ptr + row)
    place = tl.load(place_ptr + row).to(tl.int64)
    first = tl.load(reader_bounds_ptr + segment)
    last = tl.load(reader_bounds_ptr + segment + 1)
    column = tl.arange(0, block)
    inside = column < width
    head, within = (column // head_dim).to(tl.int64), column % head_dim
    grad_there, total_there = head * grad_head_stride + within, head * total_head_stride + within
    total = tl.zeros((block,), dtype=tl.float32)
    for reader in range(first, last):
        copy = tl.load(reader_starts_ptr + reader).to(tl.int64) + place
        total += tl.load(grad_ptr + copy * grad_row_stride + grad_there, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + row * total_row_stride + total_there, total.to(total_ptr.dtype.element_ty), mask=inside)


def sum_readers(
    grad: torch.Tensor,
    row_segment: torch.Tensor,
    key_place: torch.Tensor,
    reader_bounds: torch.Tensor,
    reader_starts: torch.Tensor,
    total: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the rows from the gradient of their copies.

    Args:
        grad: (K, ...) gradient of the gathered rows, contiguous, or (K, heads, D) with any strides of rows and heads.
        row_segment: (T,) int32 segment of each row.
        key_place: (T,) int32 place of a row within the keys of every segment that reads it.
        reader_bounds: (S+1,) int32 the readers of segment s are ``reader_starts[bounds[s]:bounds[s + 1]]``.
        reader_starts: int32 first key of each reader in the packed keys.
        total: (T, ...) for the result, likewise.

    Returns:
        ``total``; every sum is accumulated in float32 and rounded once.
    """
    width = total[0].numel()
    has_heads = total.dim() == 3
    grid = (row_segment.shape[0],)
    _sum_readers_kernel[grid](
        grad,
        total,
        row_segment,
        key_place,
        reader_bounds,
        reader_starts,
        grad.stride(0),
        grad.stride(1) if has_heads else width,
        total.stride(0),
        total.stride(1) if has_heads else width,
        head_dim=total.shape[-1] if has_heads else width,
        width=width,
        block=triton.next_power_of_2(width),
    )
    return total
