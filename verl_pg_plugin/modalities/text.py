"""Text: token ids, whose positions count from 0 in every sequence."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PretrainedConfig

from verl_pg_plugin.modalities.batch_error import OFF, BatchError
from verl_pg_plugin.modalities.protocol import Content
from verl_pg_plugin.reason import Reason

OTHER_MODALITIES = ("vision_config", "audio_config", "thinker_config")
TEXT_ALONE = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"})
"""Models of several modalities that run on batches of text: all dimensions of a position are then equal."""


class Text:
    """Language models, those with other inputs where a batch has none."""

    name: ClassVar[str] = "text"

    def obstacles(self, config: PretrainedConfig) -> list[Reason]:
        if config.model_type in TEXT_ALONE:
            return []
        found = [name for name in OTHER_MODALITIES if getattr(config, name, None) is not None]
        if found:
            return [Reason(f"{config.model_type} is multimodal ({found[0]}); only text models are supported")]
        rope: Any = getattr(config, "rope_parameters", None) or {}
        if "mrope_section" in rope:
            return [Reason(f"{config.model_type} uses three-dimensional position ids (mrope)")]
        return []

    def read(self, data: TensorDict) -> Content:
        input_ids = data["input_ids"]
        if not input_ids.is_nested:
            raise BatchError("input_ids must be a jagged nested tensor; convert with verl's left_right_2_no_padding")
        tokens = input_ids.values()
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise BatchError(f"input_ids must be integers, got {tokens.dtype}; use torch.int64")
        if _has_multi_modal_inputs(data):
            raise BatchError(f"packed mode reads text only, and the batch has multi_modal_inputs; {OFF}")
        offsets = input_ids.offsets().cpu().numpy().astype(np.int64)
        _check_positions(data, offsets)
        return Content(keys=tokens.detach().cpu().numpy(), offsets=offsets)


def _check_positions(data: TensorDict, offsets: np.ndarray) -> None:
    """Positions must count 0, 1, 2, ... in each of their dimensions: sharing compares tokens only."""
    position_ids = data.get("position_ids", None)
    if position_ids is None:
        return
    if not position_ids.is_nested:
        raise BatchError("position_ids must be jagged like input_ids; convert with verl's left_right_2_no_padding")
    counted = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    positions = position_ids.values().detach().cpu().numpy()  # (N,), or (dimensions, N) as mrope has
    if positions.shape[-1] != len(counted) or not (positions == counted).all():
        raise BatchError(f"position_ids do not count 0, 1, 2, ... in every sequence, which packed mode needs; {OFF}")


def _has_multi_modal_inputs(data: TensorDict) -> bool:
    inputs = data.get("multi_modal_inputs", None)
    if inputs is None:
        return False
    return any(bool(getattr(row, "data", row)) for row in inputs)
