"""Which transformers architectures can share prefixes.

Asked by preflight before Ray starts and by the engines when they have built a model.
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

REFUSED_TYPES: dict[str, str] = {
    "aria_text": "multiplies its experts' weights one by one outside of a module, where FSDP2 has not gathered them",
    "diffllama": "attends twice in each layer, which the prefix cache and FLOPs know once",
    "doge": "computes a mask of its own from the values, which attention over shared prefixes does not take",
    "dory": "attends twice in each layer, which the prefix cache and FLOPs know once",
    "emu3": "is multimodal (vq_config); only text models and Qwen's with images are supported",
    "mimo_v2_flash": "adds learned attention sinks where keys are wider than values",
    "nemotron": "does not hand keywords of its forward on to attention",
    "openai_privacy_filter": "adds learned attention sinks to the softmax",
    "phimoe": "draws experts at random in training, so a shared token would draw once for all its responses",
}
"""Pass every general check and still cannot share prefixes; the test of every type shows that nothing is missing."""


def architecture_issues(hf_config: PretrainedConfig, trust_remote_code: bool, value_model: bool = False) -> list[Issue]:
    """Every reason why a checkpoint cannot run with shared prefixes, empty when it can.

    A model class that the checkpoint brings along is not looked at: the engine examines it when it is built.
    """
    issues = config_issues(hf_config)
    auto_name = "AutoModelForTokenClassification" if value_model else "AutoModelForCausalLM"
    brings_own_class = trust_remote_code and auto_name in (getattr(hf_config, "auto_map", None) or {})
    if not brings_own_class and all(issue.fix for issue in issues):
        issues = (_value_model_issues(hf_config) if value_model else _causal_lm_issues(hf_config)) or issues
    return issues


def config_issues(hf_config: PretrainedConfig) -> list[Issue]:
    """What the config alone says against sharing prefixes; what an override lifts only where that is all."""
    text, kind, found = hf_config.get_text_config(), hf_config.model_type, []
    if getattr(hf_config, "is_encoder_decoder", False):
        found.append(f"{kind} is an encoder-decoder; only decoders share causal prefixes")
    elif type(hf_config) in MODEL_FOR_MASKED_LM_MAPPING:
        found.append(f"{kind} is an encoder, whose tokens see later ones")
    if not getattr(text, "is_causal", True):
        found.append(f"tokens of {kind} see later ones (is_causal={text.is_causal} in its config)")
    elif (bidirectional := getattr(text, "use_bidirectional_attention", None)) in (True, "all"):  # not "vision"
        found.append(f"tokens of {kind} see later ones (use_bidirectional_attention={bidirectional} in its config)")
    if kind in REFUSED_TYPES:
        found.append(f"{kind} {REFUSED_TYPES[kind]}")
    found += modality_obstacles(hf_config)
    if other := unknown_layer_types(text):
        found.append(f"{kind} has layers other than causal attention: {', '.join(other)}")
    if rope_length_limit(hf_config) is not None and (kind in IMAGE_MODEL_TYPES or getattr(hf_config, "auto_map", None)):
        found.append(f"{kind} changes rotary frequencies with the length, in code of its own or at positions of images")
    found += [obstacle for name in count_layers(text) for obstacle in MIXERS[name].obstacles(text)]
    return [Issue("", why) for why in dict.fromkeys(found)] or _random_fields(text)


def class_issues(model_class: type[PreTrainedModel]) -> list[Issue]:
    """What a model class says against it: recurrent state, or attention that cannot be replaced."""
    if getattr(model_class.config_class, "model_type", "") in stateful_model_types():
        return []  # the state is a mixer's; that every layer went through one is counted in each forward
    if getattr(model_class, "_is_stateful", False):
        return [Issue("", f"{model_class.__name__} carries recurrent state across tokens")]
    if not getattr(model_class, "_supports_attention_backend", False):
        return [Issue("", f"{model_class.__name__} does not go through transformers' attention interface")]
    return keyword_issues(model_class)


def keyword_issues(module_class: type[nn.Module]) -> list[Issue]:
    """What the class of a model or of its decoder says against handing the layout down to attention."""
    parameters = inspect.signature(module_class.forward).parameters
    if "prefix_grouper" in parameters or any(found.kind is found.VAR_KEYWORD for found in parameters.values()):
        return []
    why = f"{module_class.__name__}.forward takes no other keywords, so attention would not get the layout"
    return [Issue("", why, "let it take **kwargs and pass them on to its layers")]


def _random_fields(text: PretrainedConfig) -> list[Issue]:
    """Fields of a text config that ask for dropout or a router's jitter; verl clears those of a value model's head."""
    return [
        Issue(
            f"{OVERRIDE}.{name}={value}",
            f"the model's config says {name}={value}: a shared prefix would draw its random numbers once for all "
            "responses",
            f"++{OVERRIDE}.{name}=0.0",
        )
        for name, value in text.to_dict().items()
        if re.search("drop|jitter", name) and not re.match("(classifier|summary|encoder)_", name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    ]


def _causal_lm_issues(hf_config: PretrainedConfig) -> list[Issue]:
    mappings = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)  # in verl's order
    model_class = next((mapping[type(hf_config)] for mapping in mappings if type(hf_config) in mapping), None)
    if model_class is None:
        return [Issue("", f"transformers has no causal language model for {hf_config.model_type!r}")]
    if found := class_issues(model_class) or lm_head_issues(model_class):
        return found
    # verl builds the bare decoder unless ``architectures`` of the checkpoint says ForCausalLM.
    name = (getattr(hf_config, "architectures", None) or [model_class.__name__])[0]
    if "ForCausalLM" not in name and type(hf_config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        why = f"verl builds {hf_config.model_type} without its LM head: {name} is not called ...ForCausalLM"
        return [Issue("", why)]
    return []


def _value_model_issues(hf_config: PretrainedConfig) -> list[Issue]:
    kind = hf_config.model_type
    if type(hf_config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return [Issue("", f"transformers has no token classifier for {kind!r}, which a critic needs")]
    if kind in stateful_model_types():
        return [Issue("", f"critics of {kind} have not been verified with shared prefixes")]
    if isinstance(getattr(hf_config, "hidden_dropout", None), float):
        # ``hidden_dropout = "0"`` in verl's engine; configs of transformers 5 check the types of their fields.
        return [Issue("", f"verl writes text into hidden_dropout, which a config of {kind} refuses")]
    return class_issues(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(hf_config)])


def rope_length_limit(hf_config: PretrainedConfig) -> int | None:
    """Tokens of a sequence up to which its rotary frequencies depend on no other's length; None for any number."""
    text = hf_config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    parts = (rope, *(part for part in rope.values() if isinstance(part, dict)))  # of all layers, or each type of layer
    most = getattr(text, "max_position_embeddings", 0)
    at = {"dynamic": "", "longrope": "original_max_position_embeddings"}  # what transformers reads of each
    limits = [part.get(at[kind]) or most for part in parts if (kind := part.get("rope_type")) in at]
    return min(limits, default=None)
