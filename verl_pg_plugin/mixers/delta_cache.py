"""What Gated DeltaNet layers of a split group's chunks hand on: states, and the last inputs of the convolution.

A chunk publishes both at every position at which a later one goes on. Their gradients come back as those of cached keys
do: float32 sums, which the chunk that computes them adds in its own backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_pg_plugin.attention.cache import CacheAccess, Place
from verl_pg_plugin.attention.gather import to_device
from verl_pg_plugin.layout import IntArray

STATE, INPUTS = "state", "inputs"


@dataclass(frozen=True)
class Exchange:
    """What a forward reads from the cache and publishes, as rows of [cached | own].

    Attributes:
        read: positions behind cached tokens, at which own segments go on.
        publish: positions behind own tokens, at which those of other chunks do.
        rows: int64, those that are read and those that are published, ascending.
        index: (publish, width) int64 in ``rows``, which of them stand at each position.
    """

    read: tuple[int, ...]
    publish: tuple[int, ...]
    rows: Tensor
    index: Tensor

    @classmethod
    def of(cls, read: IntArray, publish: IntArray, published: IntArray, device: torch.device) -> Exchange | None:
        """None where nothing is exchanged.

        Args:
            published: (publish, width) rows of [cached | own], with as many cached ones at each position.
        """
        if not len(read) + len(publish):
            return None
        num_read = len(read) * published.shape[1]
        rows, index = np.unique(np.append(np.arange(num_read), published), return_inverse=True)
        sent = (to_device(array, torch.int64, device) for array in (rows, index[num_read:].reshape(published.shape)))
        return cls(tuple(read.tolist()), tuple(publish.tolist()), *sent)


@dataclass(frozen=True)
class DeltaCache:
    """The cache as one layer of a chunk, or of its prefill, reads and fills it."""

    access: CacheAccess
    layer: int

    def exchange(
        self, what: str, own: Tensor, exchange: Exchange | None, beside: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Rows [cached | own], and ``beside`` as it is.

        Args:
            what: ``STATE`` or ``INPUTS``.
            own: (N, ...) with a gradient, or none is added to what is read.
            beside: what was computed with ``own``, whose gradients come from other chunks alone where nothing reads it
                here.
        """
        if exchange is None:
            return own, beside
        found, beside = _Exchange.apply(own, beside, self, what, exchange)
        if self.access.publish is not None:
            published = found.detach()[exchange.rows]
            for position, index in zip(exchange.publish, exchange.index, strict=True):
                self.access.publish_state(Place(self.layer, what, position), published[index])
        return found, beside

    def states(self, starts: Exchange | None, num_segments: int) -> Tensor | None:
        """(N, H, K, V) states in which the first of so many segments start, zero for the others; None where all are."""
        if starts is None:
            return None
        cached = self.access.state(Place(self.layer, STATE, starts.read[0]))
        zeros = cached.new_zeros(num_segments - len(starts.read), *cached.shape[1:])
        return self.exchange(STATE, zeros.requires_grad_(torch.is_grad_enabled()), starts)[0]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, beside: Tensor | None, cache: DeltaCache, what: str, exchange: Exchange
    ) -> tuple[Tensor, Tensor | None]:
        cached = [cache.access.state(Place(cache.layer, what, position)) for position in exchange.read]
        ctx.cache, ctx.what, ctx.exchange, ctx.num_read = cache, what, exchange, sum(map(len, cached))
        rows = torch.cat([*cached, own]) if cached else own.view_as(own)
        return rows, None if beside is None else beside.view_as(beside)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad, of_beside), cache, exchange = grads, ctx.cache, ctx.exchange
        total = grad[exchange.rows].to(torch.promote_types(grad.dtype, torch.float32))
        for position, index in zip(exchange.publish, exchange.index, strict=True):
            pending = cache.access.take_state_gradient(Place(cache.layer, ctx.what, position))
            if pending is not None:
                total.index_add_(0, index, pending.to(total.dtype))
        for i, position in enumerate(exchange.read):
            width = exchange.index.shape[1]
            cache.access.add_state_gradient(Place(cache.layer, ctx.what, position), total[i * width : (i + 1) * width])
        own = grad.index_copy(0, exchange.rows, total.to(grad.dtype))[ctx.num_read :]
        return own, of_beside, None, None, None
