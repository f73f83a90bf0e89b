"""A tiny config, and a model, of every causal language model that transformers can build from sizes alone."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.mixers.hybrids import MAMBA2_KINDS
from tests.support import TINY
from verl_pg_plugin.skeleton import auto_class

TEXT_OF = {  # multimodal types, which run on text, by the type of their text model
    **{name: f"{name}_text" for name in ("gemma3", "gemma4", "gemma4_unified", "glm4v", "glm4v_moe")},
    "internvl": "qwen3",
    "mistral3": "mistral",
}
WRAPPERS = ("glm4v", "glm4v_moe", "internvl", "mistral3")
"""Those of them that transformers does not list as causal language models."""
MODEL_TYPES: tuple[str, ...] = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *WRAPPERS}))

SIZES: dict[str, Any] = {  # for configs with a field of that name
    **TINY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 6,  # shorter than the prompts of the tests
    # More experts than a token visits.
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "n_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), 1),
    "first_k_dense_replace": 1,
    # Latent attention, whose values are narrower than its keys.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}

NUMBERS = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
LATENT = {"num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 24}
PER_LAYER = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
OF_TYPE: dict[str, dict[str, Any]] = {  # type-specific names, and what enables special parts of a type
    "aria_text": {"num_experts_per_tok": 2},
    **dict.fromkeys(("axk1", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"), LATENT),
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 8},
    # Its config hands these on to its text model's, and since transformers 5.22 has none of them itself.
    "fuyu": {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", *NUMBERS)},
    "gemma3n_text": {
        **PER_LAYER,
        "pad_token_id": 96,  # a row of zeros has no gradient in transformers' model either
        "laurel_rank": 8,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {**PER_LAYER, "global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    **{
        name: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}}
        for name, section in (("glm4v_text", [1, 1, 2]), ("glm4v_moe_text", [1, 1]))  # one rotates half of a head
    },
    "gptj": {"rotary_dim": 4},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "jetmoe": {"kv_channels": 8},
    **{name: {"layer_types": ["sliding_attention", "full_attention"]} for name in ("laguna", "mellum")},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 4,
        "routed_scaling_factor": 1.0,
    },
    **{kind: {"num_hidden_layers": 4, **sizes} for kind, sizes in MAMBA2_KINDS.items()},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "xlnet": {"d_head": 8},
}

ENCODER = {
    **dict.fromkeys(("hidden_size", "out_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("intermediate_size", "image_size"), 16),
    "patch_size": 4,
}

SEED = 1
"""Weight seed. With 0 a gradient of Apertus' activation nearly cancels, and stock float32 is 1.6e-5 off float64."""
RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")


def sizes_of(config: PretrainedConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that the config has a field for."""
    known = config.to_dict().keys() | config.attribute_map.keys()
    return {name: size for name, size in sizes.items() if name in known}


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """Return a two-layer config of width 32: a layer of each kind, everything random switched off."""
    default = transformers.AutoConfig.for_model(model_type)
    if model_type in TEXT_OF:
        text = tiny_config(TEXT_OF[model_type], **overrides)
        vision = transformers.AutoConfig.for_model(model_type, vision_config={}).vision_config
        parts = {"text_config": text.to_dict(), "vision_config": {**vision.to_dict(), **sizes_of(vision, ENCODER)}}
        tied = model_type.startswith("gemma")  # as in released checkpoints
        return transformers.AutoConfig.for_model(model_type, **parts, tie_word_embeddings=tied)
    fields = default.to_dict()
    random = (name for name, value in fields.items() if isinstance(value, float) and any(r in name for r in RANDOM))
    kinds = list(dict.fromkeys(fields.get("layer_types") or ()))
    layers = {"layer_types": [kinds[0], kinds[-1]]} if kinds else {}
    given = sizes_of(default, SIZES) | dict.fromkeys(random, 0.0) | layers | OF_TYPE.get(model_type, {}) | overrides
    return transformers.AutoConfig.for_model(model_type, **given)


def save_causal(folder: Path, model_type: str, **sizes: Any) -> str:
    torch.manual_seed(SEED)
    config = tiny_config(model_type, **sizes)
    auto_class(config).from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)
