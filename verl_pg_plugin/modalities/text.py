"""How a batch of verl is read, and text, whose positions count from 0."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PretrainedConfig

from verl_pg_plugin.layout import IntArray, PackedLayout, Sequences, counted

NOTHING: IntArray = np.zeros(0, dtype=np.int64)
SHARING_OFF = "set actor_rollout_ref.actor.use_prefix_grouper=False"


class BatchError(ValueError):
    """A batch that packed mode cannot compute; the message names the cause and the fix."""


def text_obstacles(config: PretrainedConfig) -> list[str]:
    """Why a model with this config does not read text alone; empty if it does."""
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):  # text of several modalities' making: its dimensions are equal
        return []
    for other in ("vision_config", "audio_config", "thinker_config"):
        if getattr(config, other, None) is not None:
            return [f"{kind} is multimodal ({other}); only text models are supported"]
    return [f"{kind} uses three-dimensional position ids (mrope)"] if "mrope_section" in rope else []


class Text:
    """Language models.

    Attributes:
        encoders: sub-configs of the parts that compute what a modality puts in place of tokens. PrefixGrouper's padded
            groups hold none.
    """

    encoders: ClassVar[tuple[str, ...]] = ()

    def install(self, module: Any) -> None:
        """Make an unwrapped transformers model read it over tokens that may be spread over ranks."""

    def read(self, data: TensorDict, sequences: Sequences) -> Sequences:
        """The sequences of a batch in verl's no-padding format, with what they hold beside tokens.

        Raises:
            BatchError: it holds something else.
        """
        if any(multi_modal_inputs(data)):
            raise BatchError(f"packed mode reads text only, and the batch has multi_modal_inputs; {SHARING_OFF}")
        # Sharing compares tokens only, so positions must count in each of their dimensions.
        positions, expected = read_positions(data), counted(sequences.offsets)
        if positions is not None and (positions.shape[-1] != len(expected) or not (positions == expected).all()):
            raise BatchError(
                f"position_ids do not count 0, 1, 2, ... in every sequence, which packed mode needs; {SHARING_OFF}"
            )
        return sequences

    def padding_ids(self, layout: PackedLayout, runs_encoder: bool) -> IntArray:
        """Padding tokens that ``inputs`` needs behind those of the layout."""
        return NOTHING

    def inputs(self, layout: PackedLayout, sequences: Sequences, runs_encoder: bool) -> dict[str, torch.Tensor] | None:
        """What ``forward`` takes beside the tokens of a layout, by keyword; None where tokens are all.

        Args:
            layout: of ``sequences``, or of a prefix of the first.
            runs_encoder: whether the vision encoder must run even if the tokens have nothing for it.
        """
        return None


TEXT = Text()


def read_positions(data: TensorDict) -> IntArray | None:
    """Values of ``position_ids``: (N,), or (dimensions, N) as mrope has; None if there are none."""
    position_ids = data.get("position_ids", None)
    if position_ids is None:
        return None
    if not position_ids.is_nested:
        raise BatchError("position_ids must be jagged like input_ids; convert with verl's left_right_2_no_padding")
    return position_ids.values().detach().cpu().numpy()


def multi_modal_inputs(data: TensorDict) -> list[dict[str, Any]]:
    """What verl's processor made of each sequence beside its tokens, empty where that is nothing."""
    given = data.get("multi_modal_inputs", None)
    return [] if given is None else [dict(getattr(of_one, "data", of_one) or {}) for of_one in given]
