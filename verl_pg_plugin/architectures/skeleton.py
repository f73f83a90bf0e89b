"""A causal language model that exists as a config only, to look at before anything is loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

__all__ = ["skeleton"]


def skeleton(config: PretrainedConfig, trust_remote_code: bool = False) -> Any:
    """The model without storage: no weight is read, none takes memory.

    Args:
        config: of the checkpoint, or of its text model if transformers has that alone; overrides applied; it is left
            as it is.
        trust_remote_code: the user's own flag, for a class that the checkpoint brings along.

    Raises:
        ValueError: transformers has no causal language model for it.
    """
    reads_pictures = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForCausalLM
    if reads_pictures and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = AutoModelForImageTextToText
    with torch.device("meta"):
        # Which attention runs changes no weight, and the default may be one that is not installed here.
        return auto.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code, attn_implementation="eager")
