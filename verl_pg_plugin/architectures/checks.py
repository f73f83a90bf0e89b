"""Which transformers architectures cannot compute attention over shared prefixes, and why.

Asked by the validators before Ray starts and by the engines when they have built a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from verl_pg_plugin.mixers import MIXERS, count_layers, stateful_model_types, unknown_layer_types
from verl_pg_plugin.modalities import modality_obstacles
from verl_pg_plugin.reason import Reason

__all__ = [
    "HEAD_COMES_LAST",
    "REPLACED_ATTENTION",
    "Reason",
    "class_reasons",
    "config_reasons",
    "lm_head_reasons",
    "unsupported_reasons",
]

HEAD_COMES_LAST = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types tested to return the head's output as it is; others may scale or cap it."""

REPLACED_ATTENTION = ("sdpa", "flash_attention_2")
"""Attention implementations that attention over shared prefixes stands in for."""

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def unsupported_reasons(
    hf_config: PretrainedConfig, trust_remote_code: bool, value_model: bool = False
) -> list[Reason]:
    """Every reason why ``hf_config`` cannot run with shared prefixes, empty when it can.

    Args:
        hf_config: config of the checkpoint with the user's overrides applied.
        trust_remote_code: the user's own flag; a model class that the checkpoint brings along is not
            looked at here, the engine examines it when it is built.
        value_model: the checkpoint is loaded as a token classifier, not as a causal language model.
    """
    reasons = config_reasons(hf_config)
    auto_class = "AutoModelForTokenClassification" if value_model else "AutoModelForCausalLM"
    brings_own_class = trust_remote_code and auto_class in (getattr(hf_config, "auto_map", None) or {})
    if not reasons and not brings_own_class:
        reasons += _value_model_reasons(hf_config) if value_model else _causal_lm_reasons(hf_config)
    return reasons


def config_reasons(hf_config: PretrainedConfig) -> list[Reason]:
    """What the config alone says against sharing prefixes."""
    return [reason for check in _CHECKS for reason in check(hf_config)]


def class_reasons(model_class: type[PreTrainedModel]) -> list[Reason]:
    """What a model class says against it: recurrent state, or attention that cannot be replaced."""
    if getattr(model_class.config_class, "model_type", "") in stateful_model_types():
        return []  # the state is a mixer's; that every layer went through one is counted in each forward
    if getattr(model_class, "_is_stateful", False):
        return [Reason(f"{model_class.__name__} carries recurrent state across tokens")]
    if not getattr(model_class, "_supports_attention_backend", False):
        return [Reason(f"{model_class.__name__} does not go through transformers' attention interface")]
    return []


def lm_head_reasons(model_class: type[PreTrainedModel]) -> list[Reason]:
    """What the class of a causal language model says against running its head on some rows only."""
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        return [Reason(f"{model_class.__name__} cannot run its LM head on response rows only (logits_to_keep)")]
    return []


def _encoder_decoder(hf_config: PretrainedConfig) -> list[Reason]:
    if getattr(hf_config, "is_encoder_decoder", False):
        return [Reason(f"{hf_config.model_type} is an encoder-decoder; only decoders share causal prefixes")]
    return []


def _length_dependent_rope(hf_config: PretrainedConfig) -> list[Reason]:
    rope: Any = getattr(hf_config, "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    types = [rope.get("rope_type"), *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))]
    return [
        Reason(
            f"rope_type={rope_type} takes its frequencies from the longest sequence of a micro-batch, so a "
            "sequence's log-probs would depend on its neighbours"
        )
        for rope_type in types
        if rope_type in LENGTH_DEPENDENT_ROPE
    ]


def _layer_types(hf_config: PretrainedConfig) -> list[Reason]:
    other = unknown_layer_types(hf_config.get_text_config())
    if other:
        return [Reason(f"{hf_config.model_type} has layers other than causal attention: {', '.join(other)}")]
    return []


def _mixers(hf_config: PretrainedConfig) -> list[Reason]:
    config = hf_config.get_text_config()
    return [reason for name in count_layers(config) for reason in MIXERS[name].obstacles(config)]


def _causal_lm_reasons(hf_config: PretrainedConfig) -> list[Reason]:
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return [Reason(f"transformers has no causal language model for {hf_config.model_type!r}")]
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    model_class = found[0] if isinstance(found, (tuple, list)) else found
    return class_reasons(model_class) or lm_head_reasons(model_class)


def _value_model_reasons(hf_config: PretrainedConfig) -> list[Reason]:
    if type(hf_config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return [Reason(f"transformers has no token classifier for {hf_config.model_type!r}, which a critic needs")]
    return class_reasons(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(hf_config)])


_CHECKS: tuple[Callable[[PretrainedConfig], list[Reason]], ...] = (
    _encoder_decoder,
    modality_obstacles,
    _length_dependent_rope,
    _layer_types,
    _mixers,
)
