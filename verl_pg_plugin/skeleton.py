"""Build models from a config on the meta device, to inspect their modules."""

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
    """Return the auto class that builds a language model from a config, with its vision encoder if it needs one."""
    kind = type(config)
    needs_encoder = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if needs_encoder else AutoModelForCausalLM


def text_skeleton(config: PretrainedConfig, trust_remote_code: bool = False) -> Any:
    """Build the text model of a config on the meta device, or the whole model if it has no separate text model.

    The config is not modified. ValueError if transformers has no model for it.
    """
    text = config.get_text_config()
    custom_class = trust_remote_code and "AutoModelForCausalLM" in (getattr(text, "auto_map", None) or {})
    alone = text is config or custom_class or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    built = copy.deepcopy(text if alone else config)
    with torch.device("meta"), meta_device_safe_creation_ops():  # as in ``from_pretrained``
        # The default attention may not be installed here; weights do not depend on it.
        return auto_class(built).from_config(built, trust_remote_code=trust_remote_code, attn_implementation="eager")
