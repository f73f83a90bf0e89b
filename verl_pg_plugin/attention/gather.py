"""Gather rows of shared prefixes, with a backward that sums in float32."""

from typing import Any

import torch


class _GatherRows(torch.autograd.Function):
    """``index_select`` whose backward does not round between the additions.

    A prefix row is read by every response of its group, so its gradient is a sum of as many terms. Adding those
    in bf16, as the backward of ``index_select`` does, loses a bit for every doubling of the group.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        (rows,) = ctx.saved_tensors
        accumulate = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros((ctx.num_rows, *grad.shape[1:]), dtype=accumulate, device=grad.device)
        return total.index_add_(0, rows, grad.to(accumulate)).to(grad.dtype), None


def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` by index.

    Args:
        x: (T, ...) floating point.
        rows: (K,) int32 or int64 indices into the first dimension.

    Returns:
        (K, ...); gradients are accumulated in float32 (float64 for float64) and returned in the dtype of ``x``.
    """
    return _GatherRows.apply(x, rows)
