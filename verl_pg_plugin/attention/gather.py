"""Gather of tokens with a backward that sums in float32."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class Gather:
    """Copies of T = ``num_tokens`` tokens; ``tokens`` (K,) int32 is the source of each copy."""

    tokens: torch.Tensor
    num_tokens: int

    @cached_property
    def _by_token(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(K,) copies and (T+1,) bounds, int64: copies of token t are ``copies[bounds[t]:bounds[t + 1]]``."""
        in_order, copies = torch.sort(self.tokens, stable=True)
        token = torch.arange(self.num_tokens + 1, dtype=self.tokens.dtype, device=self.tokens.device)
        return copies, torch.searchsorted(in_order, token)

    def sum(self, grad: torch.Tensor, total: torch.Tensor, add: bool = False) -> None:
        """Sum ``grad`` (K, heads, D) of copies into ``total`` (T, heads, D), in a fixed order, and round once.

        Sums are float32 or wider, and so must ``total`` be to ``add`` to it. Both are contiguous in D.
        """
        if grad.is_cuda:
            from verl_pg_plugin.attention.segment_sum import sum_copies

            sum_copies(grad, *self._by_token, total, add)
            return
        wide = torch.promote_types(grad.dtype, torch.float32)
        summed = torch.zeros(total.shape, dtype=wide, device=grad.device).index_add_(0, self.tokens, grad.to(wide))
        total.copy_(total + summed if add else summed)


class _GatherTokens(torch.autograd.Function):
    """``index_select`` with a backward that rounds once; bf16 atomics lose a bit per doubling of the group size."""

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
    """Return (K, ...) copies of ``x`` (T, ...), with the backward of ``Gather.sum``."""
    return _GatherTokens.apply(x, gather)
