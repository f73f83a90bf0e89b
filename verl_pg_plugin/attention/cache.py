"""The prefix KV cache of a split group: keys, values, states and outputs that one chunk computes and others read.

In training the chunks run in reverse: a prefill computes without gradient what a chunk reads, the chunk's backward adds
to pending gradients in float32, and the chunk that computes these tokens with gradient, which comes later, adds them in
its own backward and rounds once (schedule-level prefix reuse, https://arxiv.org/abs/2606.01143).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl_pg_plugin.layout import IntArray, Layout, PackedLayout
from verl_pg_plugin.transfer import to_device


class CacheKey(NamedTuple):
    """A layer and what of it; of a recurrent layer's states also the position of the first token that reads it."""

    layer: int
    name: str
    position: int | None = None


OUTPUTS = CacheKey(-1, "outputs")
"""Of the LM head: zero at tokens that publish none."""


@dataclass
class CachedTokens:
    """Tokens ``start .. stop`` of a split group's path."""

    start: int
    stop: int
    # (tokens, ...) of each key; keys with the rotary embedding applied, outputs (tokens, C). Of a key with a
    # position, what a recurrent layer holds in front of it.
    values: dict[CacheKey, Tensor] = field(default_factory=dict)
    # Sums of their gradients over the chunks that have run, float32 or wider; empty where nothing has a gradient, and
    # once their owner has taken them.
    pending: dict[CacheKey, Tensor] = field(default_factory=dict)

    def put(self, key: CacheKey, value: Tensor, has_gradient: bool) -> None:
        """Raises RuntimeError if the key is taken: two layers have one number."""
        if key in self.values:
            raise RuntimeError(
                f"two layers call themselves layer_idx {key.layer}: set ++prefix_grouper.prefix_cache=off"
            )
        self.values[key] = value
        if has_gradient:
            self.pending[key] = torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))

    def split(self, at: int) -> tuple[CachedTokens, CachedTokens]:
        """The tokens before and from ``at`` on.

        The first are copied where they are less than half of what the tensors hold, and else views, so that however
        often tokens are split, they hold at most twice what they have once the others are gone.
        """
        before, after = CachedTokens(self.start, at), CachedTokens(at, self.stop)
        num_before, held = at - self.start, (*self.values.items(), *self.pending.items())
        of_tokens = [x for key, x in held if key.position is None]
        copy = 2 * num_before * sum(x[0].nbytes for x in of_tokens) <= _bytes(of_tokens)
        parts = (self.values, before.values, after.values), (self.pending, before.pending, after.pending)
        for tensors, first, last in parts:
            for key, x in tensors.items():
                if key.position is not None:
                    (first if key.position <= at else last)[key] = x
                    continue
                first[key] = x[:num_before].clone() if copy else x[:num_before]
                last[key] = x[num_before:]
        return before, after

    @property
    def num_bytes(self) -> int:
        """What is held, tokens that were split off included."""
        return _bytes([*self.values.values(), *self.pending.values()])


def _bytes(tensors: list[Tensor]) -> int:
    return sum(x.untyped_storage().nbytes() for x in tensors)


class PrefixCache:
    """The tokens ``0 .. num_tokens`` of one path, shallow first."""

    def __init__(self) -> None:
        self.blocks: list[CachedTokens] = []
        self.peak_bytes = 0  # most that they took in front of a forward

    @property
    def num_tokens(self) -> int:
        return self.blocks[-1].stop if self.blocks else 0

    def pop(self, keep: int) -> list[CachedTokens]:
        """Take off the tokens from ``keep`` on, shallow first."""
        popped: list[CachedTokens] = []
        while self.num_tokens > keep:
            block = self.blocks.pop()
            if block.start < keep:
                kept, block = block.split(keep)
                self.blocks.append(kept)
            popped.append(block)  # a whole one itself: what is cleared in it is cleared for whoever else still holds it
        return popped[::-1]

    def consume(self, layout: Layout) -> list[CachedTokens]:
        """Take off the tokens that a chunk of an update computes with gradient, before its prefill comes.

        Their values are dropped, since the chunk computes them again.
        """
        if not isinstance(layout, PackedLayout) or not layout.is_chunk:
            return []
        blocks = self.pop(layout.publish_start)
        for block in blocks:
            block.values.clear()
        return blocks

    def access(
        self, layout: Layout, *, publishes: bool, consumed: Sequence[CachedTokens] = (), prefill: bool = False
    ) -> CacheAccess | None:
        """What a chunk or a prefill reads, publishes and consumes; None for what neither reads nor publishes.

        Tokens that it publishes are on the cache from here on, in place of what they replace. Raises RuntimeError if
        they do not continue the path: some chunk read or published the wrong ones.
        """
        if not isinstance(layout, PackedLayout) or not layout.is_chunk:
            return None
        self.peak_bytes = max(self.peak_bytes, sum(block.num_bytes for block in self.blocks))
        read, publish = list(self.blocks), None
        if publishes:
            start, stop = layout.publish_start, layout.publish_start + len(layout.publish)
            publish = CachedTokens(start, stop)
            self.pop(start)
            if start > self.num_tokens:
                raise RuntimeError(f"tokens {start} .. {stop} do not continue {self.num_tokens} cached tokens")
            if stop > start:
                self.blocks.append(publish)
        return CacheAccess(layout, read, publish, consumed, prefill)


@dataclass(eq=False)
class CacheAccess:
    """What one forward of a chunk, or of its prefill, reads from the cache, publishes and consumes."""

    layout: PackedLayout  # of its T tokens, in front of which c are cached
    read: Sequence[CachedTokens]  # the cached ones
    publish: CachedTokens | None = None  # filled with what later chunks read; None in training, where a prefill does it
    # The same tokens, taken off the cache; their pending gradients are added here. Empty outside training.
    consumed: Sequence[CachedTokens] = ()
    prefill: bool = False  # no sequence reads this forward's outputs
    _indices: dict[str, Tensor] = field(default_factory=dict, init=False)

    def index(self, name: str, device: torch.device) -> Tensor:
        """An index map of the layout on the device."""
        if name not in self._indices:
            self._indices[name] = to_device(getattr(self.layout, name), device)
        return self._indices[name]

    def in_front(self, key: CacheKey, own: Tensor) -> Tensor:
        """(c + T, ...) cached values in front of those of the own tokens."""
        return torch.cat([*(block.values[key] for block in self.read), own])

    def publish_values(self, key: CacheKey, own: Tensor) -> None:
        """Put the published of own (T, ...) values on the cache, where this forward publishes any."""
        if self.publish is not None:
            published = own.detach().index_select(0, self.index("publish", own.device))
            self.publish.put(key, published, has_gradient=self.prefill)

    def settle(self, key: CacheKey, total: Tensor) -> Tensor:
        """Gradients (T, ...) of the own values, pending ones included, out of a ``total`` of [cached | own].

        That is float32 or wider. Gradients of cached tokens are added to their pending ones.
        """
        for block in self.read:
            block.pending[key].add_(total[block.start : block.stop])
        own = total[self.layout.num_cached :]
        if self.consumed:
            # Taken out, since the graph, and so its blocks, may live until the next forward is done.
            pending = torch.cat([block.pending.pop(key) for block in self.consumed])
            own.index_add_(0, self.index("publish", own.device), pending.to(own.dtype))
        return own

    def state(self, key: CacheKey) -> Tensor:
        return ChainMap(*(block.values for block in self.read))[key]

    def exchange_states(
        self, key: CacheKey, own: Tensor, exchange: StateExchange | None, beside: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Rows [cached | own] of states, and ``beside`` as it is; ``key`` has no position.

        ``own`` (N, ...) must have a gradient, or none is added to what is read. ``beside`` was computed with it: where
        nothing reads the states here, their gradients come from other chunks alone, and only this leads to them.
        """
        if exchange is None:
            return own, beside
        found, beside = _ExchangeStates.apply(own, beside, self, key, exchange)
        if self.publish is not None:
            published = found.detach()[exchange.rows]
            for position, index in zip(exchange.publish, exchange.index, strict=True):
                self.publish.put(key._replace(position=position), published[index], has_gradient=self.prefill)
        return found, beside

    def join_outputs(self, outputs_NC: Tensor) -> Tensor:
        """(cached heads + N, C) head outputs, as ``response_head`` indexes them, of (N, C) own ones of all ranks."""
        cached, heads = (self.index(name, outputs_NC.device) for name in ("cached_heads", "head_index"))
        # Cached as keys and values are: spread over all tokens. Who has no label computes one head that nobody reads.
        own_TC = outputs_NC.new_zeros(self.layout.num_tokens, outputs_NC.shape[1])
        own_TC = own_TC.index_copy(0, heads, outputs_NC[: len(heads)])
        joined = _JoinOutputs.apply(own_TC, self)
        at_labels = torch.cat([cached, self.layout.num_cached + heads])
        return torch.cat([joined.index_select(0, at_labels), outputs_NC[len(heads) :]])


class _JoinOutputs(torch.autograd.Function):
    """(c + T, C) cached outputs in front of the own ones, whose gradients are rounded once."""

    @staticmethod
    def forward(ctx: Any, own_TC: Tensor, access: CacheAccess) -> Tensor:
        ctx.access = access
        access.publish_values(OUTPUTS, own_TC)
        return access.in_front(OUTPUTS, own_TC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32), copy=True)
        return ctx.access.settle(OUTPUTS, total).to(grads[0].dtype), None


@dataclass(frozen=True)
class StateExchange:
    """What recurrent layers of a forward read from the cache and publish, as rows of [cached | own]."""

    read: tuple[int, ...]  # positions behind cached tokens, at which own segments go on
    publish: tuple[int, ...]  # positions behind own tokens, at which those of other chunks do
    rows: Tensor  # int64, those that are read and those that are published, ascending
    index: Tensor  # (publish, width) int64 in ``rows``, which of them stand at each position

    @classmethod
    def of(
        cls, read: IntArray, publish: IntArray, published: IntArray, device: torch.device | str
    ) -> StateExchange | None:
        """None where nothing is exchanged; ``published`` are (publish, width) rows of [cached | own]."""
        if not len(read) + len(publish):
            return None
        num_read = len(read) * published.shape[1]
        rows, index = np.unique(np.append(np.arange(num_read), published), return_inverse=True)
        sent = (to_device(array, device) for array in (rows, index[num_read:].reshape(published.shape)))
        return cls(tuple(read.tolist()), tuple(publish.tolist()), *sent)


class _ExchangeStates(torch.autograd.Function):
    """Gradients of rows that other chunks read or have read are float32 sums, which their owner rounds once."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, beside: Tensor | None, access: CacheAccess, key: CacheKey, exchange: StateExchange
    ) -> tuple[Tensor, Tensor | None]:
        cached = [access.state(key._replace(position=position)) for position in exchange.read]
        ctx.access, ctx.key, ctx.exchange, ctx.num_read = access, key, exchange, sum(map(len, cached))
        rows = torch.cat([*cached, own]) if cached else own.view_as(own)
        return rows, None if beside is None else beside.view_as(beside)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad, of_beside), access, exchange = grads, ctx.access, ctx.exchange
        total = grad[exchange.rows].to(torch.promote_types(grad.dtype, torch.float32))
        for position, index in zip(exchange.publish, exchange.index, strict=True):
            if access.consumed:  # in training, where each state has one: a KeyError if it is not there
                key = ctx.key._replace(position=position)
                pending = next((block.pending for block in access.consumed if key in block.pending), {}).pop(key)
                total.index_add_(0, index, pending.to(total.dtype))
        pending_of_read = ChainMap(*(block.pending for block in access.read))
        for position, part in zip(exchange.read, total.split(exchange.index.shape[1]), strict=False):
            pending_of_read[ctx.key._replace(position=position)].add_(part)
        own = grad.index_copy(0, exchange.rows, total.to(grad.dtype))[ctx.num_read :]
        return own, of_beside, None, None, None
