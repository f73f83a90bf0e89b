"""What the engine and the validators ask of a kind of content."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from verl_pg_plugin.layout import Layout, PackedLayout
from verl_pg_plugin.layout.order import IntArray

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl_pg_plugin.reason import Reason

L = TypeVar("L", bound=PackedLayout)


@dataclass(frozen=True)
class Content:
    """B sequences of N tokens in all, laid one after the other.

    Attributes:
        tokens: (N,) ids, as the model's embedding takes them.
        keys: (N,) integers; two sequences may share a row only where theirs are equal. For text the token ids.
        offsets: (B+1,) bounds of the sequences.
        positions: (P, N) as the model takes them; None where they count from 0 in every sequence.
        inside: (N,) tokens of the same picture in front of this one; None where nothing is indivisible.
        needs_tower: whether the model's tower has anything to compute for the batch they were read from.
    """

    tokens: IntArray
    keys: IntArray
    offsets: IntArray
    positions: IntArray | None = None
    inside: IntArray | None = None
    needs_tower: bool = False

    def select(self, rows: list[int]) -> Content:
        """Some of the sequences, in the order of ``rows``."""
        bounds = self.offsets.tolist()
        spans = [slice(bounds[row], bounds[row + 1]) for row in rows]

        def take(values: IntArray) -> IntArray:
            return np.concatenate([values[..., span] for span in spans], axis=-1)

        tokens = take(self.tokens)
        return Content(
            tokens=tokens,
            keys=tokens if self.keys is self.tokens else take(self.keys),
            offsets=np.cumsum([0, *(span.stop - span.start for span in spans)]),
            positions=None if self.positions is None else take(self.positions),
            inside=None if self.inside is None else take(self.inside),
            needs_tower=self.needs_tower,
        )

    def put_into(self, layout: L) -> L:
        """A layout that was made from the keys, with the tokens and positions that they stand for."""
        if self.keys is self.tokens:
            return layout
        index = layout.token_index
        positions = layout.position_ids if self.positions is None else self.positions[:, index]
        return replace(layout, input_ids=self.tokens[index], labels=self.tokens[index + 1], position_ids=positions)


@dataclass(frozen=True)
class ContentInputs:
    """What a model reads beside tokens.

    Attributes:
        tensors: keywords of its ``forward``, on any device.
        padding_ids: tokens of the first padding rows.
    """

    tensors: dict[str, torch.Tensor]
    padding_ids: IntArray


class Modality(Protocol):
    """One kind of content, of one model.

    Attributes:
        name: the key in ``MODALITIES``.
        in_padded_groups: whether upstream's padded groups hold it, and not packed rows only.
        replaced_by_verl: whether verl puts forwards of its own into the classes of models that read it.
        num_reserved_rows: padding rows that ``inputs`` may ask for.
        towers: sub-configs of the parts that compute what it puts in place of tokens.
    """

    name: ClassVar[str]
    in_padded_groups: ClassVar[bool]
    replaced_by_verl: ClassVar[bool]
    num_reserved_rows: ClassVar[int]
    towers: ClassVar[tuple[str, ...]]

    @classmethod
    def obstacles(cls, config: PretrainedConfig) -> list[Reason]:
        """Why a model with this config does not take this content, or not with shared rows; empty if it does."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Modality:
        """What a model with this config reads."""

    def install(self, module: Any) -> None:
        """Make an unwrapped transformers model read it over rows that may be spread over ranks."""

    def read(self, data: TensorDict) -> Content:
        """The content of a batch in verl's no-padding format.

        Raises:
            BatchError: it holds something else.
        """

    def num_padding_rows(self, layout: Layout, runs_tower: bool) -> int:
        """Rows that ``inputs`` needs behind those of the layout."""

    def patches(self, layout: Layout, micro_batch: TensorDict) -> tuple[IntArray, IntArray]:
        """Patches of each picture that the tower computes for a layout, and of each that its sequences show."""

    def inputs(self, layout: Layout, micro_batch: TensorDict, runs_tower: bool) -> ContentInputs | None:
        """What the model reads beside the rows of a layout; None where tokens are all.

        Args:
            layout: of ``micro_batch``, or of some of its sequences that come first.
            runs_tower: whether the tower must run even if the rows have nothing for it.
        """
