"""What a batch holds, as the engine packs it, whatever kind of content it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from verl_pg_plugin.layout import IntArray, PackedLayout

SHARING_OFF = "set actor_rollout_ref.actor.use_prefix_grouper=False"


class BatchError(ValueError):
    """A batch that packed mode cannot compute; the message names the cause and the fix."""


@dataclass(frozen=True)
class Content:
    """B sequences of N tokens in all, laid one after the other.

    Attributes:
        tokens: (N,) ids, as the model's embedding takes them.
        keys: (N,) integers; two sequences may share a token only where theirs are equal. For text the token ids.
        offsets: (B+1,) bounds of the sequences.
        positions: (P, N) as the model takes them; None where they count from 0 in every sequence.
        inside: (N,) tokens of the same image in front of this one; None where nothing is indivisible.
        needs_encoder: whether the model's vision encoder has anything to compute for the batch they were read from.
    """

    tokens: IntArray
    keys: IntArray
    offsets: IntArray
    positions: IntArray | None = None
    inside: IntArray | None = None
    needs_encoder: bool = False

    def select(self, sequences: list[int]) -> Content:
        """Some of the sequences, in the order of ``sequences``."""
        bounds = self.offsets.tolist()
        spans = [slice(bounds[sequence], bounds[sequence + 1]) for sequence in sequences]

        def take(values: IntArray) -> IntArray:
            return np.concatenate([values[..., span] for span in spans], axis=-1)

        tokens = take(self.tokens)
        return replace(
            self,
            tokens=tokens,
            keys=tokens if self.keys is self.tokens else take(self.keys),
            offsets=np.cumsum([0, *(span.stop - span.start for span in spans)]),
            positions=None if self.positions is None else take(self.positions),
            inside=None if self.inside is None else take(self.inside),
        )

    def put_into(self, layout: PackedLayout) -> PackedLayout:
        """A layout that was made from the keys, with the tokens and positions that they stand for."""
        if self.keys is self.tokens:
            return layout
        index = layout.token_index
        positions = layout.position_ids if self.positions is None else self.positions[:, index]
        return replace(layout, input_ids=self.tokens[index], labels=self.tokens[index + 1], position_ids=positions)


@dataclass(frozen=True)
class ContentInputs:
    """What a model reads beside tokens: keywords of its ``forward``, and tokens of the first padding tokens' places."""

    tensors: dict[str, torch.Tensor]
    padding_ids: IntArray
