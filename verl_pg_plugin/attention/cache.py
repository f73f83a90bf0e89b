"""The prefix cache of a split group: keys, values, recurrent states and head outputs that chunks share.

In training the chunks run in reverse order. A prefill computes the tokens that a chunk reads, without gradient, and the
chunk's backward adds to their pending gradients in float32. A later chunk computes these tokens with gradient: its
backward adds the pending gradients and rounds once (schedule-level prefix reuse, https://arxiv.org/abs/2606.01143).
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
    """Layer and name of a cached tensor; for a recurrent state also the position of the first token that reads it."""

    layer: int
    name: str
    position: int | None = None


OUTPUTS = CacheKey(-1, "outputs")
"""Key of the LM head's outputs; zero at tokens without a label."""


@dataclass
class CachedTokens:
    """Cached tokens ``start .. stop`` of a split group's path."""

    start: int
    stop: int
    # (tokens, ...), attention keys with the rotary embedding applied; for a key with a position, the state before it.
    values: dict[CacheKey, Tensor] = field(default_factory=dict)
    # Gradient sums over the chunks that ran, float32 or wider; empty without gradients and once their owner has them.
    pending: dict[CacheKey, Tensor] = field(default_factory=dict)

    def put(self, key: CacheKey, value: Tensor, has_gradient: bool) -> None:
        """Add a tensor; RuntimeError if the key exists, because two layers have the same number."""
        if key in self.values:
            raise RuntimeError(f"layer_idx={key.layer}: two layers have it. Fix: ++prefix_grouper.prefix_cache=off")
        self.values[key] = value
        if has_gradient:
            self.pending[key] = torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))

    def split(self, at: int) -> tuple[CachedTokens, CachedTokens]:
        """Return the tokens before position ``at`` and those from it on.

        A first part of at most half the storage is copied, so repeated splits hold at most twice what remains.
        """
        before, after = CachedTokens(self.start, at), CachedTokens(at, self.stop)
        num_before, tensors = at - self.start, (*self.values.items(), *self.pending.items())
        of_tokens = [x for key, x in tensors if key.position is None]
        copy = 2 * num_before * sum(x[0].nbytes for x in of_tokens) <= _bytes(of_tokens)
        parts = (self.values, before.values, after.values), (self.pending, before.pending, after.pending)
        for whole, first, last in parts:
            for key, x in whole.items():
                if key.position is not None:
                    (first if key.position <= at else last)[key] = x
                    continue
                first[key] = x[:num_before].clone() if copy else x[:num_before]
                last[key] = x[num_before:]
        return before, after

    @property
    def num_bytes(self) -> int:
        """Bytes of storage, including tokens that were split off."""
        return _bytes([*self.values.values(), *self.pending.values()])


def _bytes(tensors: list[Tensor]) -> int:
    return sum(x.untyped_storage().nbytes() for x in tensors)


class PrefixCache:
    """Cached tokens ``0 .. num_tokens`` of one path, in order."""

    def __init__(self) -> None:
        self.blocks: list[CachedTokens] = []
        self.peak_bytes = 0  # highest number of bytes at the start of a forward

    @property
    def num_tokens(self) -> int:
        return self.blocks[-1].stop if self.blocks else 0

    def pop(self, keep: int) -> list[CachedTokens]:
        """Remove and return the tokens from ``keep`` on, in order."""
        popped: list[CachedTokens] = []
        while self.num_tokens > keep:
            block = self.blocks.pop()
            if block.start < keep:
                kept, block = block.split(keep)
                self.blocks.append(kept)
            popped.append(block)  # no copy, so a graph that still refers to a block sees it cleared
        return popped[::-1]

    def consume(self, layout: Layout) -> list[CachedTokens]:
        """Remove and return the tokens that a chunk of an update recomputes, before its prefill; frees their values."""
        if not isinstance(layout, PackedLayout) or not layout.is_chunk:
            return []
        blocks = self.pop(layout.publish_start)
        for block in blocks:
            block.values.clear()
        return blocks

    def access(
        self, layout: Layout, *, publishes: bool, consumed: Sequence[CachedTokens] = (), prefill: bool = False
    ) -> CacheAccess | None:
        """Return the cache access of a chunk or prefill; None if it neither reads nor publishes.

        Published tokens replace cached ones. RuntimeError if they do not continue the path.
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
    """Cache access of one forward over T tokens, of a chunk or its prefill, after c cached tokens."""

    layout: PackedLayout
    read: Sequence[CachedTokens]  # the c cached tokens
    publish: CachedTokens | None = None  # to fill for later chunks; None in a chunk of an update: its prefill publishes
    consumed: Sequence[CachedTokens] = ()  # own tokens of a chunk of an update, with pending gradients
    prefill: bool = False
    _indices: dict[str, Tensor] = field(default_factory=dict, init=False)

    def index(self, name: str, device: torch.device) -> Tensor:
        """Return an index array of the layout on the device, copied once."""
        if name not in self._indices:
            self._indices[name] = to_device(getattr(self.layout, name), device)
        return self._indices[name]

    def with_cached(self, key: CacheKey, own: Tensor) -> Tensor:
        """Return (c + T, ...) cached values followed by the own ones (T, ...)."""
        return torch.cat([*(block.values[key] for block in self.read), own])

    def publish_values(self, key: CacheKey, own: Tensor) -> None:
        """Publish the values of published tokens among own (T, ...), if this forward publishes."""
        if self.publish is not None:
            published = own.detach().index_select(0, self.index("publish", own.device))
            self.publish.put(key, published, has_gradient=self.prefill)

    def exchange_gradients(self, key: CacheKey, total: Tensor) -> Tensor:
        """Add gradients of cached tokens to their pending ones, and pending ones to those of own tokens.

        ``total`` (c + T, ...) is float32 or wider. Returns the complete gradients of own values (T, ...).
        """
        for block in self.read:
            block.pending[key].add_(total[block.start : block.stop])
        own = total[self.layout.num_cached :]
        if self.consumed:
            # Popped to free memory: the graph, which refers to the blocks, may live until the next forward ends.
            pending = torch.cat([block.pending.pop(key) for block in self.consumed])
            own.index_add_(0, self.index("publish", own.device), pending.to(own.dtype))
        return own

    def state(self, key: CacheKey) -> Tensor:
        return ChainMap(*(block.values for block in self.read))[key]

    def exchange_states(
        self, key: CacheKey, own: Tensor, exchange: StateExchange | None, passthrough: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return recurrent states [cached | own] and ``passthrough``, and publish states; ``key`` has no position.

        ``own`` (N, ...) must require gradients, or cached states get none. ``passthrough`` is an output computed with
        ``own``: it keeps the backward of own states in the graph if only other chunks read them.
        """
        if exchange is None:
            return own, passthrough
        states, passthrough = _ExchangeStates.apply(own, passthrough, self, key, exchange)
        if self.publish is not None:
            published = states.detach()[exchange.rows]
            for position, index in zip(exchange.publish, exchange.index, strict=True):
                self.publish.put(key._replace(position=position), published[index], has_gradient=self.prefill)
        return states, passthrough

    def join_outputs(self, outputs_NC: Tensor) -> Tensor:
        """Return (cached heads + N, C) head outputs, as ``response_head`` indexes them, from (N, C) own ones."""
        cached, heads = (self.index(name, outputs_NC.device) for name in ("cached_heads", "head_index"))
        # Cached per token, like keys and values. A layout without labels computes one output that is not read.
        own_TC = outputs_NC.new_zeros(self.layout.num_tokens, outputs_NC.shape[1])
        own_TC = own_TC.index_copy(0, heads, outputs_NC[: len(heads)])
        joined = _JoinOutputs.apply(own_TC, self)
        at_labels = torch.cat([cached, self.layout.num_cached + heads])
        return torch.cat([joined.index_select(0, at_labels), outputs_NC[len(heads) :]])


class _JoinOutputs(torch.autograd.Function):
    """``CacheAccess.with_cached`` for head outputs, with gradients that are rounded once."""

    @staticmethod
    def forward(ctx: Any, own_TC: Tensor, access: CacheAccess) -> Tensor:
        ctx.access = access
        access.publish_values(OUTPUTS, own_TC)
        return access.with_cached(OUTPUTS, own_TC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32), copy=True)
        return ctx.access.exchange_gradients(OUTPUTS, total).to(grads[0].dtype), None


@dataclass(frozen=True)
class StateExchange:
    """Recurrent states that a forward reads from the cache and publishes, as rows of [cached | own] states."""

    read: tuple[int, ...]  # positions where own segments continue cached tokens
    publish: tuple[int, ...]  # positions where other chunks continue own tokens
    rows: Tensor  # int64, rows that are read or published, ascending
    index: Tensor  # (publish, width) int64, index in ``rows`` of the rows at each published position

    @classmethod
    def of(
        cls, read: IntArray, publish: IntArray, published: IntArray, device: torch.device | str
    ) -> StateExchange | None:
        """Build from (publish, width) ``published`` rows of [cached | own]; None if nothing is read or published."""
        if not len(read) + len(publish):
            return None
        num_read = len(read) * published.shape[1]
        rows, index = np.unique(np.append(np.arange(num_read), published), return_inverse=True)
        on_device = (to_device(array, device) for array in (rows, index[num_read:].reshape(published.shape)))
        return cls(tuple(read.tolist()), tuple(publish.tolist()), *on_device)


class _ExchangeStates(torch.autograd.Function):
    """Sums gradients of states that other chunks read in float32; the chunk that owns a state rounds once."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, passthrough: Tensor | None, access: CacheAccess, key: CacheKey, exchange: StateExchange
    ) -> tuple[Tensor, Tensor | None]:
        cached = [access.state(key._replace(position=position)) for position in exchange.read]
        ctx.access, ctx.key, ctx.exchange, ctx.num_read = access, key, exchange, sum(map(len, cached))
        rows = torch.cat([*cached, own]) if cached else own.view_as(own)
        return rows, None if passthrough is None else passthrough.view_as(passthrough)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad, grad_passthrough), access, exchange = grads, ctx.access, ctx.exchange
        total = grad[exchange.rows].to(torch.promote_types(grad.dtype, torch.float32))
        for position, index in zip(exchange.publish, exchange.index, strict=True):
            if access.consumed:  # in training every state has a pending gradient: KeyError if not
                key = ctx.key._replace(position=position)
                pending = next((block.pending for block in access.consumed if key in block.pending), {}).pop(key)
                total.index_add_(0, index, pending.to(total.dtype))
        pending_of_read = ChainMap(*(block.pending for block in access.read))
        for position, part in zip(exchange.read, total.split(exchange.index.shape[1]), strict=False):
            pending_of_read[ctx.key._replace(position=position)].add_(part)
        own = grad.index_copy(0, exchange.rows, total.to(grad.dtype))[ctx.num_read :]
        return own, grad_passthrough, None, None, None
