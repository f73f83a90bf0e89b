"""Model inputs: the base class of modalities, which is text alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from verl_pg_plugin.issue import SHARING_OFF, BatchError
from verl_pg_plugin.layout import IntArray, PackedLayout, Sequences, counted

FOR_POSITIONS_ALONE = frozenset({"images_seqlens", "mm_token_type_ids", "second_per_grid_ts"})
"""Entries that serve to compute positions only, which the batch already has."""


@dataclass(frozen=True)
class Kind:
    """Images or videos, with their keys in verl's ``multi_modal_inputs``, which are keywords of the model too."""

    name: str  # in messages
    pixels: str  # key of (patches, elements of a patch)
    grids: str  # key of (images, 3): frames, rows and columns of patches
    token_id: int  # of the placeholder


@dataclass(frozen=True)
class Modality:
    """Text alone."""

    kinds: tuple[Kind, ...] = ()
    refuses: str = "which packed mode does not pass to this model"  # why other outputs of a processor are refused
    keywords: Mapping[str, Any] = field(default_factory=dict)  # of the model's forward, in every batch

    def install(self, module: Any) -> None:
        """Change the model to run this modality."""

    def read(self, data: TensorDict, sequences: Sequences) -> Sequences:
        """Add keys, positions and images of a batch in verl's no-padding format; BatchError if they do not fit."""
        self.read_outputs(data)
        check_counted(read_positions(data), sequences.offsets)
        return sequences

    def read_outputs(self, data: TensorDict) -> list[dict[str, Any]]:
        """Return verl's ``multi_modal_inputs`` of each sequence, [] if absent; BatchError for names of no ``kinds``."""
        known = {name for kind in self.kinds for name in (kind.pixels, kind.grids)} | FOR_POSITIONS_ALONE
        column = data.get("multi_modal_inputs", None)
        outputs = [] if column is None else [dict(getattr(entry, "data", entry) or {}) for entry in column]
        for sequence, output in enumerate(outputs):
            if unknown := sorted({name for name, value in output.items() if value is not None} - known):
                returned = f"sequence {sequence}: the processor returns {', '.join(unknown)}"
                raise BatchError(f"{returned}, {self.refuses}; {SHARING_OFF}")
        return outputs

    def inputs(
        self, layout: PackedLayout, sequences: Sequences, shown: frozenset[Kind]
    ) -> tuple[list[int], dict[str, torch.Tensor] | None]:
        """Return tokens to pad with, and the model's additional keywords; None for text."""
        return [], None


TEXT = Modality()


def read_positions(data: TensorDict) -> IntArray | None:
    """Return the (N,) or (P, N) positions of a batch, or None."""
    position_ids = data.get("position_ids", None)
    if position_ids is not None and not position_ids.is_nested:
        raise BatchError("position_ids must be jagged like input_ids; convert with verl's left_right_2_no_padding")
    return None if position_ids is None else position_ids.values().detach().cpu().numpy()


def check_counted(positions: IntArray | None, offsets: IntArray) -> None:
    """Raise BatchError unless positions are 0, 1, 2, ... in each dimension: sharing compares tokens only."""
    if positions is not None and (positions.shape[-1] != offsets[-1] or (positions != counted(offsets)).any()):
        raise BatchError(
            f"position_ids do not count 0, 1, 2, ... in every sequence, which packed mode needs; {SHARING_OFF}"
        )
