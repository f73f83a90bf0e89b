"""A mini-batch as numbers on the host: its sequences, what of them may be shared, and their layouts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from verl_pg_plugin.layout.order import IntArray, PrefixOrder, build_prefix_order, counted
from verl_pg_plugin.layout.packed import Chunk, PackedLayout, build_packed_layout, build_prefill


@dataclass(frozen=True)
class Sequences:
    """B sequences of prompt + response with N tokens in all, laid one after the other; see ``build_packed_layout``."""

    tokens: IntArray
    offsets: IntArray
    prompt_lengths: IntArray
    classes: IntArray | None = None  # temperatures
    keys: IntArray | None = None  # (N,) a token is shared only where these are equal; None where the ids say so
    positions: IntArray | None = None  # (P, N) as the model takes them; None where they count from 0 in every sequence
    inside: IntArray | None = None  # (N,) tokens of the same image in front of this one; None where there are no images
    images: Sequence[Sequence[Any]] = ()  # of each sequence, in their order; empty where a model reads text alone
    routes: IntArray | None = None  # (N, layers, experts of a token) that tokens go to; None where the model chooses

    @property
    def lengths(self) -> IntArray:
        """(B,) tokens."""
        return np.diff(self.offsets)

    def order(self) -> PrefixOrder:
        """The sequences sorted, and what neighbours share."""
        return build_prefix_order(self._keys, self.offsets, self.classes, self.inside)

    def select(self, indices: list[int]) -> "Sequences":
        """In the order of ``indices``."""
        bounds = self.offsets.tolist()
        spans = [slice(bounds[i], bounds[i + 1]) for i in indices]

        def take(values: Any) -> Any:
            return None if values is None else np.concatenate([values[..., span] for span in spans], axis=-1)

        return Sequences(
            tokens=take(self.tokens),
            offsets=np.cumsum([0, *(span.stop - span.start for span in spans)]),
            prompt_lengths=self.prompt_lengths[indices],
            classes=None if self.classes is None else self.classes[indices],
            keys=take(self.keys),
            positions=take(self.positions),
            inside=take(self.inside),
            images=[self.images[i] for i in indices] if self.images else (),
            routes=None if self.routes is None else np.concatenate([self.routes[span] for span in spans]),
        )

    def unshared(self) -> "Sequences":
        """The same sequences, none of which shares anything in packed mode."""
        return replace(self, classes=np.arange(len(self.prompt_lengths)))

    def responses_apart(self) -> "Sequences":
        """The same sequences, no two of which share a token that predicts a response token.

        For losses that depend on what the response's own teacher said.
        """
        keys = self._keys.astype(np.int64)
        own = counted(self.offsets) >= np.repeat(self.prompt_lengths, self.lengths)
        keys[own] = keys.max() + 1 + np.arange(own.sum())
        return replace(self, keys=keys)

    @cached_property
    def prompt_groups(self) -> IntArray:
        """(B,) number of the prompt; sequences whose prompts are equal, and of one class, have the same."""
        classes = np.zeros(len(self.prompt_lengths), np.int64) if self.classes is None else self.classes
        spans = zip(classes.tolist(), self.offsets.tolist(), self.prompt_lengths.tolist(), strict=False)
        prompts = [(group, self._keys[start : start + length].tobytes()) for group, start, length in spans]
        numbers: dict[tuple[int, bytes], int] = {}
        return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])

    def build_layout(self, chunk: Chunk | None = None, first_label: int = 0, forward_only: bool = True) -> PackedLayout:
        """The packed tokens of one forward, see ``build_packed_layout``.

        Where no sequence has two tokens it is one token that nobody reads: a forward never runs on nothing.
        """
        if self.lengths.max() < 2:
            idle = self._first_token_twice().build_layout()
            return replace(idle, num_sequences=len(self.lengths), num_total_tokens=len(self.tokens))
        return build_packed_layout(
            self.tokens,
            self.offsets,
            self.prompt_lengths,
            self.classes,
            self.inside,
            chunk,
            first_label,
            forward_only,
            keys=self.keys,
            positions=self.positions,
        )

    def build_idle_prefill(self) -> PackedLayout:
        """One token that nobody reads, of the first sequence; all tokens of an image if it begins with one.

        For a micro-batch that has nothing to prefill while another rank's has: FSDP gathers weights on all or none.
        """
        if self.lengths[0] < 2:
            return replace(self._first_token_twice().build_idle_prefill(), num_total_tokens=1)
        stop = 1 if self.inside is None else 1 + int(np.argmin(self.inside[1 : self.offsets[1]] > 0))
        layout = build_prefill(self.tokens, self.offsets, self.positions, start=0, stop=stop, first_label=stop)
        return replace(layout, publish=layout.publish[:0])

    def _first_token_twice(self) -> "Sequences":
        """A prompt of two tokens in place of the first sequence, which has one."""
        twice = self.select([0, 0])
        return replace(twice, offsets=twice.offsets[::2], prompt_lengths=np.array([2]), classes=None)

    @property
    def _keys(self) -> IntArray:
        return self.tokens if self.keys is None else self.keys
