"""A mini-batch as numpy arrays: its sequences, what they may share, and their layouts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from verl_pg_plugin.layout.order import IntArray, PrefixOrder, build_prefix_order, counted
from verl_pg_plugin.layout.packed import Chunk, PackedLayout, build_packed_layout, build_prefill


@dataclass(frozen=True)
class Sequences:
    """B concatenated sequences of prompt + response with N tokens in all; see ``build_packed_layout``."""

    tokens: IntArray
    offsets: IntArray
    prompt_lengths: IntArray
    classes: IntArray | None = None  # temperatures
    keys: IntArray | None = None  # (N,) compared instead of token ids; None to compare the ids
    positions: IntArray | None = None  # (P, N) as the model takes them; None if they count from 0 in every sequence
    offset_in_image: IntArray | None = None  # (N,) earlier tokens of the same image; None without images
    images: Sequence[Sequence[Any]] = ()  # of each sequence, in order; empty for a text model
    routes: IntArray | None = None  # (N, layers, experts of a token) replayed routing; None if the model routes

    @property
    def lengths(self) -> IntArray:
        """(B,) tokens."""
        return np.diff(self.offsets)

    def order(self) -> PrefixOrder:
        """Sort the sequences and count what neighbours share."""
        return build_prefix_order(self._keys, self.offsets, self.classes, self.offset_in_image)

    def select(self, indices: list[int]) -> "Sequences":
        """Return the sequences at ``indices``, in that order."""
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
            offset_in_image=take(self.offset_in_image),
            images=[self.images[i] for i in indices] if self.images else (),
            routes=None if self.routes is None else np.concatenate([self.routes[span] for span in spans]),
        )

    def unshared(self) -> "Sequences":
        """Return the same sequences such that packed mode shares nothing."""
        return replace(self, classes=np.arange(len(self.prompt_lengths)))

    def responses_apart(self) -> "Sequences":
        """Return the same sequences such that no response tokens are shared, for losses on teacher outputs."""
        keys = self._keys.astype(np.int64)
        own = counted(self.offsets) >= np.repeat(self.prompt_lengths, self.lengths)
        keys[own] = keys.max() + 1 + np.arange(own.sum())
        return replace(self, keys=keys)

    @cached_property
    def prompt_groups(self) -> IntArray:
        """Group number (B,), equal for sequences of one class with equal prompts."""
        classes = np.zeros(len(self.prompt_lengths), np.int64) if self.classes is None else self.classes
        spans = zip(classes.tolist(), self.offsets.tolist(), self.prompt_lengths.tolist(), strict=False)
        prompts = [(group, self._keys[start : start + length].tobytes()) for group, start, length in spans]
        numbers: dict[tuple[int, bytes], int] = {}
        return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])

    def build_layout(self, chunk: Chunk | None = None, first_label: int = 0, forward_only: bool = True) -> PackedLayout:
        """Lay out one forward; see ``build_packed_layout``.

        If no sequence has two tokens, the layout is one token whose output is not read, since a forward needs a token.
        """
        if self.lengths.max() < 2:
            idle = self._first_token_twice().build_layout()
            return replace(idle, num_sequences=len(self.lengths), num_total_tokens=len(self.tokens))
        arrays = self.tokens, self.offsets, self.prompt_lengths, self.classes, self.offset_in_image
        return build_packed_layout(*arrays, chunk, first_label, forward_only, keys=self.keys, positions=self.positions)

    def build_idle_prefill(self) -> PackedLayout:
        """Lay out a prefill that nothing reads: the first sequence's first token, or all of the image it begins with.

        FSDP gathers weights on all ranks, so a rank without a prefill runs this one while another rank prefills.
        """
        if self.lengths[0] < 2:
            return replace(self._first_token_twice().build_idle_prefill(), num_total_tokens=1)
        image = self.offset_in_image
        stop = 1 if image is None else 1 + int(np.argmin(image[1 : self.offsets[1]] > 0))
        layout = build_prefill(self.tokens, self.offsets, self.positions, start=0, stop=stop, first_label=stop)
        return replace(layout, publish=layout.publish[:0])

    def _first_token_twice(self) -> "Sequences":
        """Return one prompt that repeats the first token, for sequences too short to compute any."""
        twice = self.select([0, 0])
        return replace(twice, offsets=twice.offsets[::2], prompt_lengths=np.array([2]), classes=None)

    @property
    def _keys(self) -> IntArray:
        return self.tokens if self.keys is None else self.keys
