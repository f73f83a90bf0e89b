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

__all__ = ["auto_class", "skeleton", "text_skeleton"]


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' class that builds a language model from a config, with its tower if it cannot do without."""
    needs_tower = (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return AutoModelForImageTextToText if needs_tower else AutoModelForCausalLM


def skeleton(config: PretrainedConfig, trust_remote_code: bool = False) -> Any:
    """The model without storage: no weight is read, none takes memory.

    Args:
        config: of the checkpoint, overrides applied; it is left as it is.
        trust_remote_code: the user's own flag, for a class that the checkpoint brings along.

    Raises:
        ValueError: transformers has no causal language model for it.
    """
    with torch.device("meta"):
        # Which attention runs changes no weight, and the default may be one that is not installed here.
        return auto_class(config).from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code, attn_implementation="eager"
        )


def text_skeleton(config: PretrainedConfig, trust_remote_code: bool = False) -> Any:
    """The same of the text model in a config, or of the whole where transformers has no such model alone."""
    text = config.get_text_config()
    brings_its_class = trust_remote_code and "AutoModelForCausalLM" in (getattr(text, "auto_map", None) or {})
    alone = text is config or brings_its_class or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    return skeleton(text if alone else config, trust_remote_code)
