"""Models built from a config without storage, for what their modules tell."""

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
from transformers.initialization import meta_device_safe_creation_ops


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' class that builds a language model from a config, with its vision encoder if it needs one."""
    kind = type(config)
    needs_encoder = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if needs_encoder else AutoModelForCausalLM


def text_skeleton(config: PretrainedConfig, trust_remote_code: bool = False) -> Any:
    """The text model of a config without storage, or the whole where transformers has no such model alone.

    The config is left as it is. ValueError where transformers has none for it.
    """
    text = config.get_text_config()
    brings_its_class = trust_remote_code and "AutoModelForCausalLM" in (getattr(text, "auto_map", None) or {})
    alone = text is config or brings_its_class or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    built = copy.deepcopy(text if alone else config)
    with torch.device("meta"), meta_device_safe_creation_ops():  # as in ``from_pretrained``
        # Which attention runs changes no weight, and the default may be one that is not installed here.
        return auto_class(built).from_config(built, trust_remote_code=trust_remote_code, attn_implementation="eager")
