"""The prefix KV cache of a split group: keys, values and head outputs that one chunk computes and others read.

A group that exceeds a micro-batch is computed in chunks, see ``layout.packed``. In training the chunks run in reverse
order: a prefill computes without gradient what a chunk reads, the chunk's backward adds to float32 sums, the pending
gradients, and the chunk that computes these tokens with gradient, which comes later, adds them in its own backward and
rounds once. The scheme is known as schedule-level prefix reuse (https://arxiv.org/abs/2606.01143).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_pg_plugin.attention.gather import to_device
from verl_pg_plugin.layout import PackedLayout

Place = tuple[int, str]
"""A layer, and "k" or "v"."""
OUTPUTS: Place = (-1, "outputs")
"""Of the LM head: zero at tokens that publish none."""
Tensors = dict[Place, Tensor]


@dataclass
class CachedTokens:
    """Tokens ``start .. stop`` of a split group's path.

    Attributes:
        values: (tokens, ...) of each place; keys with the rotary embedding applied, outputs (tokens, C).
        pending: float32 or wider sums of their gradients over the chunks that have run; empty where nothing has a
            gradient, and once their owner has taken them.
    """

    start: int
    stop: int
    values: Tensors = field(default_factory=dict)
    pending: Tensors = field(default_factory=dict)

    def put(self, place: Place, value: Tensor, has_gradient: bool) -> None:
        """Raises RuntimeError if the place is taken: two layers have one number."""
        if place in self.values:
            raise RuntimeError(
                f"two attention layers call themselves layer_idx {place[0]}: set ++prefix_grouper.carry=never"
            )
        self.values[place] = value
        if has_gradient:
            self.pending[place] = torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))

    def split(self, at: int) -> tuple[CachedTokens, CachedTokens]:
        """The tokens before and from ``at`` on.

        The first are copied where they are less than half of what the tensors hold, and else views, so that however
        often tokens are split, they hold at most twice what they have once the others are gone.
        """
        token_bytes = sum(x.nbytes for x in self._tensors) // (self.stop - self.start)
        copy = 2 * (at - self.start) * token_bytes <= self.num_bytes

        def first(tensors: Tensors) -> Tensors:
            parts = {place: x[: at - self.start] for place, x in tensors.items()}
            return {place: x.clone() for place, x in parts.items()} if copy else parts

        def last(tensors: Tensors) -> Tensors:
            return {place: x[at - self.start :] for place, x in tensors.items()}

        before = CachedTokens(self.start, at, first(self.values), first(self.pending))
        return before, CachedTokens(at, self.stop, last(self.values), last(self.pending))

    def drop_values(self) -> None:
        """Free them: the chunk that takes the pending gradients computes the values again."""
        self.values.clear()

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self.values.values(), *self.pending.values()]

    @property
    def num_bytes(self) -> int:
        """What is held, tokens that were split off included."""
        return sum(x.untyped_storage().nbytes() for x in self._tensors)


class PrefixCache:
    """The tokens ``0 .. num_tokens`` of one path, shallow first.

    Attributes:
        peak_bytes: most that they ever took.
    """

    def __init__(self) -> None:
        self.blocks: list[CachedTokens] = []
        self.peak_bytes = 0

    @property
    def num_tokens(self) -> int:
        return self.blocks[-1].stop if self.blocks else 0

    def __iter__(self) -> Iterator[CachedTokens]:
        return iter(self.blocks)

    def push(self, block: CachedTokens) -> None:
        """Put tokens behind the others.

        Raises:
            RuntimeError: they do not continue the path, so some chunk read or published the wrong ones.
        """
        if block.start != self.num_tokens:
            raise RuntimeError(f"tokens {block.start} .. {block.stop} do not continue {self.num_tokens} cached tokens")
        self.blocks.append(block)
        self.peak_bytes = max(self.peak_bytes, sum(block.num_bytes for block in self.blocks))

    def pop(self, keep: int) -> list[CachedTokens]:
        """Take off the tokens from ``keep`` on, shallow first."""
        popped: list[CachedTokens] = []
        while self.num_tokens > keep:
            block = self.blocks.pop()
            if block.start >= keep:
                popped.append(block)  # itself: what is cleared in it is cleared for whoever else still holds it
                continue
            kept, taken = block.split(keep)
            popped.append(taken)
            self.blocks.append(kept)
        return popped[::-1]


class CacheAccess:
    """What one forward of a chunk, or of its prefill, reads from the cache, publishes and consumes.

    Attributes:
        layout: of the tokens.
        read: the cached tokens ``0 .. num_cached``.
        publish: filled with the tokens that later chunks read; None in training, where a prefill publishes them.
        consumed: the same tokens, taken off the cache; their pending gradients are added here. Empty outside training.
        prefill: no sequence reads this forward's outputs.
    """

    def __init__(
        self,
        layout: PackedLayout,
        read: Sequence[CachedTokens],
        publish: CachedTokens | None = None,
        consumed: Sequence[CachedTokens] = (),
        prefill: bool = False,
    ) -> None:
        self.layout, self.read, self.publish, self.consumed, self.prefill = layout, read, publish, consumed, prefill
        self._published: Tensor | None = None

    def in_front(self, place: Place, own: Tensor) -> Tensor:
        """(c + T, ...) cached values in front of those of the T own tokens."""
        return torch.cat([*(block.values[place] for block in self.read), own])

    def publish_layer(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        if self.publish is not None:
            for name, x in (("k", k_TGD), ("v", v_TGD)):
                published = x.detach().index_select(0, self._published_tokens(x.device))
                self.publish.put((layer, name), published, has_gradient=self.prefill)

    def settle_layer(self, layer: int, *totals: Tensor) -> list[Tensor]:
        """Gradients (T, ...) of the own keys and values, pending ones included.

        Args:
            totals: (c + T, ...) gradients of [cached | own] keys and of values, float32 or wider. Those of cached
                tokens are added to their pending ones.
        """
        return [self._settle((layer, name), total) for name, total in zip("kv", totals, strict=True)]

    def _settle(self, place: Place, total: Tensor) -> Tensor:
        for block in self.read:
            block.pending[place].add_(total[block.start : block.stop])
        own = total[self.layout.num_cached :]
        if self.consumed:
            # Taken out, since the graph, and so its blocks, may live until the next forward is done.
            pending = torch.cat([block.pending.pop(place) for block in self.consumed])
            own.index_add_(0, self._published_tokens(own.device), pending.to(own.dtype))
        return own

    def _published_tokens(self, device: torch.device) -> Tensor:
        if self._published is None:
            self._published = to_device(self.layout.publish, torch.int64, device)
        return self._published

    def join_outputs(self, outputs_NC: Tensor) -> Tensor:
        """Head outputs of cached tokens in front of those of own ones.

        Args:
            outputs_NC: (N, C) of the own tokens at ``head_index``, of all ranks that share the tokens.

        Returns:
            (cached heads + N, C), as ``response_head`` of the layout indexes them.
        """
        if self.publish is not None:
            published = outputs_NC.new_zeros(len(self.layout.publish), outputs_NC.shape[1])
            tokens, heads = self._published_outputs(outputs_NC.device)
            published[tokens] = outputs_NC.detach()[heads]
            self.publish.put(OUTPUTS, published, has_gradient=self.prefill)
        return outputs_NC if self.prefill else _JoinOutputs.apply(outputs_NC, self)

    def _published_outputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of published tokens that publish head outputs, their places among the published and the own heads."""
        layout = self.layout
        return tuple(to_device(x, torch.int64, device) for x in (layout.publish_heads, layout.published_head_index))


class _JoinOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_NC: Tensor, access: CacheAccess) -> Tensor:
        ctx.access = access
        heads = access.layout.cached_heads
        if not len(heads):
            return own_NC.clone()
        cached = torch.cat([block.values[OUTPUTS] for block in access.read])
        return torch.cat([cached[to_device(heads, torch.int64, own_NC.device)], own_NC])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        access: CacheAccess = ctx.access
        heads = access.layout.cached_heads
        for block in access.read:
            first, last = np.searchsorted(heads, [block.start, block.stop])
            if last > first:
                pending = block.pending[OUTPUTS]
                tokens = to_device(heads[first:last] - block.start, torch.int64, grad.device)
                pending.index_add_(0, tokens, grad[first:last].to(pending.dtype))
        own = grad[len(heads) :].clone()
        if access.consumed and len(access.layout.publish_heads):
            pending = torch.cat([block.pending[OUTPUTS] for block in access.consumed])
            tokens, at = access._published_outputs(grad.device)
            own.index_add_(0, at, pending[tokens].to(own.dtype))
        return own, None
