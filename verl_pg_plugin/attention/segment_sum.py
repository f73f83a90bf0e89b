"""Triton kernel that sums the gradients of all copies of a token, in float32 and in a fixed order."""

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_copies_kernel(
    grad_ptr,
    total_ptr,
    copies_ptr,
    bounds_ptr,
    grad_token_stride,
    grad_head_stride,
    total_token_stride,
    total_head_stride,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    add: tl.constexpr,
):
    """Sum the copies of one token, in order; one program per token."""
    token = tl.program_id(0).to(tl.int64)
    first, last = tl.load(bounds_ptr + token), tl.load(bounds_ptr + token + 1)
    column = tl.arange(0, block)
    mask = column < width
    head, within = (column // head_dim).to(tl.int64), column % head_dim
    grads = grad_ptr + head * grad_head_stride + within
    totals = total_ptr + token * total_token_stride + head * total_head_stride + within
    total = tl.zeros((block,), dtype=tl.float32)
    for i in range(first, last):
        copy = tl.load(copies_ptr + i)
        total += tl.load(grads + copy * grad_token_stride, mask=mask, other=0.0).to(tl.float32)
    if add:
        total += tl.load(totals, mask=mask, other=0.0)
    tl.store(totals, total.to(total_ptr.dtype.element_ty), mask=mask)


def sum_copies(grad: torch.Tensor, copies: torch.Tensor, bounds: torch.Tensor, total: torch.Tensor, add: bool) -> None:
    """``Gather.sum`` on CUDA, for any strides of tokens and heads; arguments from ``Gather._by_token``."""
    _, heads, head_dim = total.shape
    width = heads * head_dim
    strides = (*grad.stride()[:2], *total.stride()[:2])
    sizes = {"head_dim": head_dim, "width": width, "block": triton.next_power_of_2(width)}
    _sum_copies_kernel[(len(total),)](grad, total, copies, bounds, *strides, **sizes, add=add)
