"""Sizes of the models that benchmarks build, as fields of transformers' config of Qwen3.

One with ``model_type`` is of that type.
"""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
MARKS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
QWEN_MARKS = dict(zip(MARKS, (151652, 151653, 151655, 151656), strict=True))

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "tiny-vl": {
        "model_type": "qwen3_vl",
        "text_config": {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {**MROPE, "mrope_section": [8, 4, 4]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 4,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **dict(zip(MARKS, range(500, 504), strict=True)),
    },
    "qwen3-vl-8b": {
        "model_type": "qwen3_vl",
        "text_config": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {**MROPE, "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "out_hidden_size": 4096,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        **QWEN_MARKS,
        "tie_word_embeddings": False,
    },
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "out_hidden_size": 3584,
        },
        **QWEN_MARKS,
        "tie_word_embeddings": False,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
    },
}

# As many FLOPs in heads of 128, for builds of flash-attn that stop there.
SHAPES["qwen3.5-9b-heads-128"] = {
    **SHAPES["qwen3.5-9b"],
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def config_of(name: str, **overrides: Any) -> PretrainedConfig:
    """The config of a shape; ``overrides`` are those of its text model."""
    shape = {"model_type": "qwen3", **SHAPES[name]}
    if "text_config" in shape:
        return AutoConfig.for_model(**{**shape, "text_config": {**shape["text_config"], **overrides}})
    return AutoConfig.for_model(**{**shape, **overrides})
