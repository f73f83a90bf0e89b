"""Gather tokens, with a backward that sums in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Gather:
    """Which of T tokens to copy where; K copies. All on one device.

    Attributes:
        tokens: (K,) int32 token of each copy.
        num_tokens: T.
        copies: (K,) int64 copies sorted by token; on a GPU alone.
        bounds: (T+1,) int64 the copies of token t are ``copies[bounds[t]:bounds[t + 1]]``; on a GPU alone.
    """

    tokens: torch.Tensor
    num_tokens: int
    copies: torch.Tensor | None = None
    bounds: torch.Tensor | None = None

    @classmethod
    def of(cls, tokens: torch.Tensor, num_tokens: int) -> Gather:
        """From int32 ``tokens`` (K,) on the device; the host does not wait for it."""
        if not tokens.is_cuda:
            return cls(tokens, num_tokens)
        in_order, copies = torch.sort(tokens, stable=True)
        each = torch.arange(num_tokens + 1, dtype=tokens.dtype, device=tokens.device)
        return cls(tokens, num_tokens, copies, torch.searchsorted(in_order, each))

    def sum(self, grad: torch.Tensor, total: torch.Tensor, add: bool = False) -> torch.Tensor:
        """Gradient of the tokens from the gradient of their copies.

        Args:
            grad: (K, ...) floating point.
            total: (T, ...) for the result; (T, heads, D) may have any strides of tokens and heads.
            add: to what ``total`` holds, which is float32 or wider.

        Returns:
            ``total``; summed in float32 (on a CPU, float64 for float64), in a fixed order, rounded once.
        """
        if grad.is_cuda:
            from verl_pg_plugin.attention.segment_sum import sum_copies

            if grad.dim() != 3 or grad.stride(-1) != 1:
                grad = grad.contiguous()
            return sum_copies(grad, self.copies, self.bounds, total, add)
        wide = torch.promote_types(grad.dtype, torch.float32)
        found = torch.zeros(total.shape, dtype=wide, device=grad.device).index_add_(0, self.tokens, grad.to(wide))
        return total.add_(found) if add else total.copy_(found)


def to_device(array: np.ndarray, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Copy an index map to the device, see ``send``."""
    return send(torch.from_numpy(np.ascontiguousarray(array)).to(dtype), device)


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on the device; from the host through pinned memory, so that the host does not wait for the copy."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class _GatherTokens(torch.autograd.Function):
    """``index_select`` whose backward does not round between the additions.

    A shared token is read by every response of its group, so its gradient is a sum of as many terms. Adding those in
    bf16, as atomics on a GPU do, loses a bit for every doubling of the group.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: Gather) -> torch.Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return ctx.gather.sum(grad, grad.new_empty(ctx.gather.num_tokens, *grad.shape[1:])), None


def gather_tokens(x: torch.Tensor, gather: Gather) -> torch.Tensor:
    """(K, ...) copies of ``x`` (T, ...); gradients are those of ``Gather.sum``, in the dtype of ``x``."""
    return _GatherTokens.apply(x, gather)
