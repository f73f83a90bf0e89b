"""Which transformers architectures cannot compute attention over shared prefixes, and why.

Asked by the validators before Ray starts and by the engines when they have built a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from verl_pg_plugin.architectures.randomness import random_reasons
from verl_pg_plugin.architectures.refused_types import REFUSED_TYPES
from verl_pg_plugin.mixers import MIXERS, count_layers, stateful_model_types, unknown_layer_types
from verl_pg_plugin.modalities import modality_obstacles
from verl_pg_plugin.reason import Reason

__all__ = [
    "REPLACED_ATTENTION",
    "Reason",
    "class_reasons",
    "config_reasons",
    "lm_head_reasons",
    "unsupported_reasons",
]

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
    if not brings_own_class and all(reason.fix for reason in reasons):
        reasons += _value_model_reasons(hf_config) if value_model else _causal_lm_reasons(hf_config)
    return _weightiest(reasons)


def config_reasons(hf_config: PretrainedConfig) -> list[Reason]:
    """What the config alone says against sharing prefixes."""
    return _weightiest([reason for check in _CHECKS for reason in check(hf_config)])


def _weightiest(reasons: list[Reason]) -> list[Reason]:
    """Those that no override lifts; where there is none, all. Each once."""
    return list(dict.fromkeys([reason for reason in reasons if not reason.fix] or reasons))


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


def _encoder(hf_config: PretrainedConfig) -> list[Reason]:
    if getattr(hf_config, "is_encoder_decoder", False):
        return [Reason(f"{hf_config.model_type} is an encoder-decoder; only decoders share causal prefixes")]
    if type(hf_config) in MODEL_FOR_MASKED_LM_MAPPING:
        return [Reason(f"{hf_config.model_type} is an encoder, whose tokens see later ones")]
    return []


def _refused_type(hf_config: PretrainedConfig) -> list[Reason]:
    why = REFUSED_TYPES.get(hf_config.model_type)
    return [Reason(f"{hf_config.model_type} {why}")] if why else []


def _random(hf_config: PretrainedConfig) -> list[Reason]:
    return random_reasons(hf_config.get_text_config())


def _length_dependent_rope(hf_config: PretrainedConfig) -> list[Reason]:
    rope: Any = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
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
    model_class = language_model_class(hf_config)
    if model_class is None:
        return [Reason(f"transformers has no causal language model for {hf_config.model_type!r}")]
    return (
        class_reasons(model_class)
        or lm_head_reasons(model_class)
        or _headless(hf_config, model_class)
        or _key_value_heads(hf_config)
    )


def language_model_class(hf_config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """transformers' class for a config, as verl chooses it; None if there is none."""
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(hf_config) in mapping:
            found = mapping[type(hf_config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    return None


def _headless(hf_config: PretrainedConfig, model_class: type[PreTrainedModel]) -> list[Reason]:
    """verl builds the bare trunk unless ``architectures`` of the checkpoint says ForCausalLM."""
    name = (getattr(hf_config, "architectures", None) or [model_class.__name__])[0]
    if "ForCausalLM" in name or type(hf_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return []
    return [Reason(f"verl builds {hf_config.model_type} without its LM head: {name} is not called ...ForCausalLM")]


def _key_value_heads(hf_config: PretrainedConfig) -> list[Reason]:
    text = hf_config.get_text_config()
    if hasattr(text, "num_key_value_heads"):
        return []
    number = getattr(text, "num_attention_heads", "<attention heads>")
    return [
        Reason(
            f"verl reads num_key_value_heads, which {hf_config.model_type} does not have",
            fix=f"++actor_rollout_ref.model.override_config.num_key_value_heads={number}",
        )
    ]


def _value_model_reasons(hf_config: PretrainedConfig) -> list[Reason]:
    if type(hf_config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return [Reason(f"transformers has no token classifier for {hf_config.model_type!r}, which a critic needs")]
    if hf_config.model_type in stateful_model_types():
        return [Reason(f"critics of {hf_config.model_type} have not been verified with shared prefixes")]
    if isinstance(getattr(hf_config, "hidden_dropout", None), float):
        # ``hidden_dropout = "0"`` in verl's engine; configs of transformers 5 check the types of their fields.
        return [Reason(f"verl writes text into hidden_dropout, which a config of {hf_config.model_type} refuses")]
    return class_reasons(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(hf_config)]) or _key_value_heads(hf_config)


_CHECKS: tuple[Callable[[PretrainedConfig], list[Reason]], ...] = (
    _encoder,
    _refused_type,
    modality_obstacles,
    _length_dependent_rope,
    _layer_types,
    _mixers,
    _random,
)
