"""What tokens stand for: text, from which other modalities are derived."""

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from verl_pg_plugin.issue import SHARING_OFF, BatchError
from verl_pg_plugin.layout import IntArray, PackedLayout, Sequences, counted

FOR_POSITIONS_ALONE = frozenset({"images_seqlens", "mm_token_type_ids", "second_per_grid_ts"})
"""What verl adds and the model needs for positions alone, which the batch has."""


@dataclass(frozen=True)
class Kind:
    """Images or videos; two keys of verl's ``multi_modal_inputs``, which are keywords of the model too."""

    name: str  # for messages
    pixels: str  # key of (patches, numbers)
    grids: str  # key of (images, 3), each a number of frames, rows and columns of patches
    token_id: int  # the placeholder


@dataclass(frozen=True)
class Modality:
    """Text alone."""

    kinds: tuple[Kind, ...] = ()  # what tokens stand for besides

    def install(self, module: Any) -> None:
        """Change a model whose tokens stand for more."""

    def read(self, data: TensorDict, sequences: Sequences) -> Sequences:
        """The sequences of a batch in verl's no-padding format, with what they hold beside tokens, or BatchError."""
        read_outputs(data)
        positions, offsets = read_positions(data), sequences.offsets
        # Sharing compares tokens only, so positions must count in each of their dimensions.
        if positions is not None and (positions.shape[-1] != offsets[-1] or (positions != counted(offsets)).any()):
            raise BatchError(
                f"position_ids do not count 0, 1, 2, ... in every sequence, which packed mode needs; {SHARING_OFF}"
            )
        return sequences

    def inputs(
        self, layout: PackedLayout, sequences: Sequences, shown: frozenset[Kind]
    ) -> tuple[list[int], dict[str, torch.Tensor] | None]:
        """Tokens to pad with, and keywords of the model beside tokens; None where text is all."""
        return [], None


TEXT = Modality()
"""Of language models."""


def read_outputs(data: TensorDict, known: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Return verl's ``multi_modal_inputs`` of each sequence, if there are any; BatchError for names not ``known``."""
    given = data.get("multi_modal_inputs", None)
    outputs = [] if given is None else [dict(getattr(of_one, "data", of_one) or {}) for of_one in given]
    for sequence, of_one in enumerate(outputs):
        names = {name for name, value in of_one.items() if value is not None}
        if unknown := sorted(names - known - FOR_POSITIONS_ALONE):
            raise BatchError(
                f"sequence {sequence}: the processor returns {', '.join(unknown)}, which packed mode does not hand to "
                f"this model; {SHARING_OFF}"
            )
    return outputs


def read_positions(data: TensorDict) -> IntArray | None:
    """Return the (N,) or (P, N) positions of a batch; None if it has none."""
    position_ids = data.get("position_ids", None)
    if position_ids is not None and not position_ids.is_nested:
        raise BatchError("position_ids must be jagged like input_ids; convert with verl's left_right_2_no_padding")
    return None if position_ids is None else position_ids.values().detach().cpu().numpy()
