"""Gather tokens, with a backward that sums in float32."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class Gather:
    """Copies of T tokens, ``num_tokens``; ``tokens`` (K,) int32 has the token of each copy."""

    tokens: torch.Tensor
    num_tokens: int

    @cached_property
    def _by_token(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(K,) copies and (T+1,) bounds, int64: token t's are ``copies[bounds[t]:bounds[t + 1]]``.

        Made when gradients are first summed. The host does not wait for the device.
        """
        in_order, copies = torch.sort(self.tokens, stable=True)
        each = torch.arange(self.num_tokens + 1, dtype=self.tokens.dtype, device=self.tokens.device)
        return copies, torch.searchsorted(in_order, each)

    def sum(self, grad: torch.Tensor, total: torch.Tensor, add: bool = False) -> None:
        """Gradient ``total`` (T, heads, D) of the tokens from ``grad`` (K, heads, D), that of their copies.

        Summed in float32 (on a CPU, float64 for float64), in a fixed order, and rounded once. To ``add`` to what it
        holds, ``total`` must be float32 or wider. The numbers of a head follow each other.
        """
        if grad.is_cuda:
            from verl_pg_plugin.attention.segment_sum import sum_copies

            sum_copies(grad, *self._by_token, total, add)
            return
        wide = torch.promote_types(grad.dtype, torch.float32)
        found = torch.zeros(total.shape, dtype=wide, device=grad.device).index_add_(0, self.tokens, grad.to(wide))
        total.copy_(total + found if add else found)


class _GatherTokens(torch.autograd.Function):
    """``index_select`` whose backward rounds once: bf16 atomics lose a bit for every doubling of a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: Gather) -> torch.Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        total = grad.new_empty(ctx.gather.num_tokens, *grad.shape[1:])
        ctx.gather.sum(grad.view(len(grad), 1, -1), total.view(len(total), 1, -1))
        return total, None


def gather_tokens(x: torch.Tensor, gather: Gather) -> torch.Tensor:
    """(K, ...) copies of ``x`` (T, ...); the gradient is that of ``Gather.sum``, in the dtype of ``x``."""
    return _GatherTokens.apply(x, gather)
