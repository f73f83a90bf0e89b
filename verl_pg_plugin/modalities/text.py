"""Text: token ids, whose positions count from 0 in every sequence."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PretrainedConfig

from verl_pg_plugin.layout import IntArray, Layout
from verl_pg_plugin.modalities.content import SHARING_OFF, BatchError, Content, ContentInputs

OTHER_MODALITIES = ("vision_config", "audio_config", "thinker_config")
TEXT_ALONE = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
"""Text models of several modalities' making: all dimensions of a position are equal."""


def text_obstacles(config: PretrainedConfig) -> list[str]:
    """Why a model with this config does not read text alone; empty if it does."""
    if config.model_type in TEXT_ALONE:
        return []
    found = [name for name in OTHER_MODALITIES if getattr(config, name, None) is not None]
    if found:
        return [f"{config.model_type} is multimodal ({found[0]}); only text models are supported"]
    rope: Any = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        return [f"{config.model_type} uses three-dimensional position ids (mrope)"]
    return []


class Text:
    """Language models.

    Attributes:
        encoders: sub-configs of the parts that compute what a modality puts in place of tokens. PrefixGrouper's padded
            groups hold none.
    """

    encoders: ClassVar[tuple[str, ...]] = ()

    def install(self, module: Any) -> None:
        """Make an unwrapped transformers model read it over tokens that may be spread over ranks."""

    def read(self, data: TensorDict) -> Content:
        """The content of a batch in verl's no-padding format.

        Raises:
            BatchError: it holds something else.
        """
        tokens, offsets = read_tokens(data)
        if any(multi_modal_inputs(data)):
            raise BatchError(f"packed mode reads text only, and the batch has multi_modal_inputs; {SHARING_OFF}")
        # Sharing compares tokens only, so positions must count in each of their dimensions.
        positions, expected = read_positions(data), counted(offsets)
        if positions is not None and (positions.shape[-1] != len(expected) or not (positions == expected).all()):
            raise BatchError(
                f"position_ids do not count 0, 1, 2, ... in every sequence, which packed mode needs; {SHARING_OFF}"
            )
        return Content(tokens=tokens, keys=tokens, offsets=offsets)

    def num_padding_tokens(self, layout: Layout, runs_encoder: bool) -> int:
        """Padding tokens that ``inputs`` needs behind those of the layout."""
        return 0

    def patches(self, layout: Layout, micro_batch: TensorDict) -> tuple[IntArray, IntArray]:
        """Patches of each image that the encoder computes for a layout, and of each that its sequences show."""
        none = np.zeros(0, dtype=np.int64)
        return none, none

    def inputs(self, layout: Layout, micro_batch: TensorDict, runs_encoder: bool) -> ContentInputs | None:
        """What the model reads beside the tokens of a layout; None where tokens are all.

        Args:
            layout: of ``micro_batch``, or of some of its sequences that come first.
            runs_encoder: whether the vision encoder must run even if the tokens have nothing for it.
        """
        return None


TEXT = Text()


def read_tokens(data: TensorDict) -> tuple[IntArray, IntArray]:
    """Ids (N,) and offsets (B+1,) of ``input_ids``; BatchError if they are not jagged integers."""
    input_ids = data["input_ids"]
    if not input_ids.is_nested:
        raise BatchError("input_ids must be a jagged nested tensor; convert with verl's left_right_2_no_padding")
    tokens = input_ids.values()
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise BatchError(f"input_ids must be integers, got {tokens.dtype}; use torch.int64")
    return tokens.detach().cpu().numpy(), input_ids.offsets().cpu().numpy().astype(np.int64)


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


def counted(offsets: IntArray) -> IntArray:
    """Positions (N,) that count 0, 1, 2, ... in every sequence."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
