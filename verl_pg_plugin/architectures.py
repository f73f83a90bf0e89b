"""Check whether a transformers architecture can share prefixes.

Preflight checks before Ray starts, the engines when they have built a model.
"""

import inspect
import re
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from verl_pg_plugin.issue import Issue
from verl_pg_plugin.lm_head import lm_head_issues
from verl_pg_plugin.mixers import MIXERS, count_layers, stateful_model_types, unknown_layer_types
from verl_pg_plugin.modalities import IMAGE_MODEL_TYPES, modality_obstacles

OVERRIDE = "actor_rollout_ref.model.override_config"

_ATTENDS_TWICE = "attends twice in each layer, and the prefix cache and FLOPs assume once"
REFUSED_TYPES: dict[str, str] = {
    "aria_text": "multiplies experts' weights outside their module, where FSDP2 has not gathered them",
    "diffllama": _ATTENDS_TWICE,
    "doge": "computes an attention mask from the values, which attention over shared prefixes does not support",
    "dory": _ATTENDS_TWICE,
    "emu3": "is multimodal (vq_config), and no test runs it",
    "llama4_text": "scales queries by their index in a batch's row, which is not their position in packed tokens",
    "mimo_v2_flash": "adds learned attention sinks where keys are wider than values",
    "nemotron": "does not pass keywords of its forward to attention",
    "openai_privacy_filter": "adds learned attention sinks to the softmax",
    "phimoe": "samples experts at random in training, and a shared token would sample once for all its responses",
}
"""Types that pass every general check and still cannot share prefixes. A test of every type keeps this complete."""


def architecture_issues(hf_config: PretrainedConfig, trust_remote_code: bool, value_model: bool = False) -> list[Issue]:
    """Return the issues of a checkpoint. The engine checks a model class from the checkpoint when it builds it."""
    issues = config_issues(hf_config)
    auto_name = "AutoModelForTokenClassification" if value_model else "AutoModelForCausalLM"
    custom_class = trust_remote_code and auto_name in (getattr(hf_config, "auto_map", None) or {})
    if not custom_class and all(issue.fix for issue in issues):
        issues = (_value_model_issues(hf_config) if value_model else _causal_lm_issues(hf_config)) or issues
    return issues


def config_issues(hf_config: PretrainedConfig) -> list[Issue]:
    """Return the issues of a config; those that an override fixes only if there are no others."""
    text, kind, reasons = hf_config.get_text_config(), hf_config.model_type, []
    if getattr(hf_config, "is_encoder_decoder", False):
        reasons.append(f"{kind} is an encoder-decoder; only decoders share causal prefixes")
    elif type(hf_config) in MODEL_FOR_MASKED_LM_MAPPING:
        reasons.append(f"{kind} is an encoder, whose tokens see later ones")
    if not getattr(text, "is_causal", True):
        reasons.append(f"tokens of {kind} see later ones (is_causal={text.is_causal} in its config)")
    elif (bidirectional := getattr(text, "use_bidirectional_attention", None)) in (True, "all"):  # not "vision"
        reasons.append(f"tokens of {kind} see later ones (use_bidirectional_attention={bidirectional} in its config)")
    reasons += [f"{name} {REFUSED_TYPES[name]}" for name in (kind, text.model_type) if name in REFUSED_TYPES]
    reasons += modality_obstacles(hf_config)
    if other := unknown_layer_types(text):
        reasons.append(f"{kind} has layers other than causal attention: {', '.join(other)}")
    if rope_length_limit(hf_config) is not None and (kind in IMAGE_MODEL_TYPES or getattr(hf_config, "auto_map", None)):
        reasons.append(f"{kind} changes rotary frequencies with the length: unsupported with images and custom code")
    reasons += [obstacle for name in count_layers(text) for obstacle in MIXERS[name].obstacles(text)]
    return [Issue("", why) for why in dict.fromkeys(reasons)] or _random_fields(text)


def class_issues(model_class: type[PreTrainedModel]) -> list[Issue]:
    """Return the issues of a model class: recurrent state, or attention that cannot be replaced."""
    if getattr(model_class.config_class, "model_type", "") in stateful_model_types():
        return []  # a mixer holds the state, and each forward counts the layers that used one
    if getattr(model_class, "_is_stateful", False):
        return [Issue("", f"{model_class.__name__} carries recurrent state across tokens")]
    if not getattr(model_class, "_supports_attention_backend", False):
        return [Issue("", f"{model_class.__name__} does not go through transformers' attention interface")]
    return keyword_issues(model_class)


def keyword_issues(module_class: type[nn.Module]) -> list[Issue]:
    """Return an issue if the class of a model or decoder cannot pass the layout to attention."""
    parameters = inspect.signature(module_class.forward).parameters
    if "prefix_grouper" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    why = f"{module_class.__name__}.forward takes no **kwargs, so attention would not get the layout"
    return [Issue("", why, "accept **kwargs and pass them to its layers")]


def _random_fields(text: PretrainedConfig) -> list[Issue]:
    """Return the fields that enable dropout or router jitter. verl clears those of a value model's head."""
    why = "a shared prefix would draw random numbers once for all its responses"
    return [
        Issue(f"{OVERRIDE}.{name}={value}", f"the config has {name}={value}, and {why}", f"++{OVERRIDE}.{name}=0.0")
        for name, value in text.to_dict().items()
        if re.search("drop|jitter", name) and not re.match("(classifier|summary|encoder)_", name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    ]


def _causal_lm_issues(hf_config: PretrainedConfig) -> list[Issue]:
    mappings = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)  # in verl's order
    model_class = next((mapping[type(hf_config)] for mapping in mappings if type(hf_config) in mapping), None)
    if model_class is None:
        return [Issue("", f"transformers has no causal language model for {hf_config.model_type!r}")]
    text = type(hf_config.get_text_config())
    of_text = class_issues(MODEL_FOR_CAUSAL_LM_MAPPING[text]) if text in MODEL_FOR_CAUSAL_LM_MAPPING else []
    if issues := class_issues(model_class) or of_text or lm_head_issues(model_class):
        return issues
    # verl builds the bare decoder unless ``architectures`` of the checkpoint has a ForCausalLM class.
    name = (getattr(hf_config, "architectures", None) or [model_class.__name__])[0]
    if "ForCausalLM" not in name and type(hf_config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return [Issue("", f"verl builds {hf_config.model_type} without its LM head: {name} is no ...ForCausalLM class")]
    return []


def _value_model_issues(hf_config: PretrainedConfig) -> list[Issue]:
    kind = hf_config.model_type
    if type(hf_config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return [Issue("", f"transformers has no token classifier for {kind!r}, which a critic needs")]
    if kind in stateful_model_types():
        return [Issue("", f"critics of {kind} have not been verified with shared prefixes")]
    if isinstance(getattr(hf_config, "hidden_dropout", None), float):
        # verl's engine sets ``hidden_dropout = "0"``; configs of transformers 5 check types.
        return [Issue("", f"verl sets hidden_dropout to a string, which the config of {kind} refuses")]
    return class_issues(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(hf_config)])


def rope_length_limit(hf_config: PretrainedConfig) -> int | None:
    """Return the longest sequence whose rotary frequencies do not depend on other sequences; None for no limit."""
    text = hf_config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    parts = (rope, *(part for part in rope.values() if isinstance(part, dict)))  # for all layers, or per layer type
    default = getattr(text, "max_position_embeddings", 0)
    fields = {"dynamic": "", "longrope": "original_max_position_embeddings"}  # the field that transformers reads
    limits = [part.get(fields[kind]) or default for part in parts if (kind := part.get("rope_type")) in fields]
    return min(limits, default=None)
