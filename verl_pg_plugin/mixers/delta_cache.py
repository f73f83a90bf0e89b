"""What Gated DeltaNet layers of a split group's chunks hand on: states, and the last inputs of the convolution.

A chunk publishes both at every position at which a later one goes on. Their gradients come back as those of cached keys
do: float32 sums, which the chunk that computes them adds in its own backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_pg_plugin.attention.cache import CacheAccess, Place

STATE, INPUTS = "state", "inputs"


@dataclass(frozen=True)
class Tails:
    """Inputs of the ``reach`` tokens in front of some positions, which a convolution sees beyond them.

    Attributes:
        read: positions behind cached tokens, at which own segments go on.
        publish: positions behind own tokens, at which those of other chunks do.
        tokens: int64, those of all tails, ascending, in [the tails of ``read`` | own tokens].
        index: (publish, reach) int64 in ``tokens``; where a sequence has no token, any.
        reach: width of the convolution less one.
    """

    read: tuple[int, ...]
    publish: tuple[int, ...]
    tokens: Tensor
    index: Tensor
    reach: int

    @property
    def num_read(self) -> int:
        """Tokens of the tails of ``read``."""
        return len(self.read) * self.reach


@dataclass(frozen=True)
class DeltaCache:
    """The cache as one layer of a chunk, or of its prefill, reads and fills it."""

    access: CacheAccess
    layer: int

    def with_tails(self, x_TD: Tensor, tails: Tails) -> Tensor:
        """[the tails of ``tails.read`` | own tokens], as ``tails.tokens`` counts them."""
        if not len(tails.tokens):
            return x_TD
        found = _WithTails.apply(x_TD, self, tails)
        if self.access.publish is not None:
            last = found.detach()[tails.tokens]
            for place, index in zip(tails.publish, tails.index, strict=True):
                self.access.publish_state(Place(self.layer, INPUTS, place), last[index])
        return found

    def read_states(self, anchor: Tensor, positions: tuple[int, ...]) -> Tensor | None:
        """(N, H, K, V) states of the tokens in front of each position, zero at 0; None where all are.

        Args:
            anchor: any tensor with a gradient, so that the backward comes by.
            positions: (N,) some of them 0.
        """
        return _ReadStates.apply(anchor, self, positions) if any(positions) else None

    def publish_states(self, out: Tensor, state: Tensor, publish: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
        """Both as they are.

        Args:
            out: what the segments put out that end in ``state``.
            publish: which of the states (N, H, K, V) stands at which position.
        """
        for segment, position in publish:
            self.access.publish_state(Place(self.layer, STATE, position), state[segment])
        return _AddStateGradients.apply(out, state, self, publish)


class _WithTails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, cache: DeltaCache, tails: Tails) -> Tensor:
        ctx.cache, ctx.tails = cache, tails
        return torch.cat([*(cache.access.state(Place(cache.layer, INPUTS, place)) for place in tails.read), x_TD])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cache, tails = ctx.cache, ctx.tails
        (grad,) = grads
        of_tails = grad[tails.tokens].to(torch.promote_types(grad.dtype, torch.float32))
        for place, index in zip(tails.publish, tails.index, strict=True):
            pending = cache.access.take_state_gradient(Place(cache.layer, INPUTS, place))
            if pending is not None:
                of_tails.index_add_(0, index, pending.to(of_tails.dtype))
        for i, place in enumerate(tails.read):
            of_tail = of_tails[i * tails.reach : (i + 1) * tails.reach]
            cache.access.add_state_gradient(Place(cache.layer, INPUTS, place), of_tail)
        return grad.index_copy(0, tails.tokens, of_tails.to(grad.dtype))[tails.num_read :], None, None


class _ReadStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, cache: DeltaCache, positions: tuple[int, ...]) -> Tensor:
        ctx.cache, ctx.positions = cache, positions
        found = {place: cache.access.state(Place(cache.layer, STATE, place)) for place in positions if place}
        zero = torch.zeros_like(next(iter(found.values())))
        return torch.stack([found.get(place, zero) for place in positions])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        for place, grad in zip(ctx.positions, grads[0], strict=True):
            if place:
                ctx.cache.access.add_state_gradient(Place(ctx.cache.layer, STATE, place), grad)
        return None, None, None


class _AddStateGradients(torch.autograd.Function):
    """The identity. ``out`` passes too: a state that nothing here reads has its gradients from other chunks alone."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, state: Tensor, cache: DeltaCache, publish: Any) -> tuple[Tensor, Tensor]:
        ctx.cache, ctx.publish = cache, publish
        return out.view_as(out), state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_out, of_state = grads[0], grads[1].clone()
        for segment, place in ctx.publish:
            pending = ctx.cache.access.take_state_gradient(Place(ctx.cache.layer, STATE, place))
            if pending is not None:
                of_state[segment] += pending
        return of_out, of_state, None, None
