"""Model sizes for benchmarks, as fields of transformers' configs."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig

FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
MARKS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
VISION = ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "out_hidden_size")


def text_sizes(*sizes: int, **more: Any) -> dict[str, Any]:
    """Return the fields of a text model, given the sizes in the order of ``FIELDS``."""
    return {**dict(zip(FIELDS, sizes, strict=True)), **more}


def qwen3_vl(
    text: dict[str, Any], sections: list[int], theta: float, marks: Sequence[int], vision: Sequence[int], **more: Any
) -> dict[str, Any]:
    """Return the config of a Qwen3-VL: token ids in the order of ``MARKS``, and an encoder in that of ``VISION``."""
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_interleaved": True, "mrope_section": sections}
    return {
        "model_type": "qwen3_vl",
        "text_config": {**text, "rope_parameters": rope},
        "vision_config": {**dict(zip(VISION, vision, strict=True)), **more},
        **dict(zip(MARKS, marks, strict=True)),
        "tie_word_embeddings": False,
    }


MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
HYBRID = {
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": False,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": text_sizes(512, 128, 384, 4, 4, 2, 32, tie_word_embeddings=True),
    "qwen3-0.6b": text_sizes(151936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True),
    "qwen3-4b": text_sizes(151936, 2560, 9728, 36, 32, 8, 128, tie_word_embeddings=True),
    "qwen3-8b": text_sizes(151936, 4096, 12288, 36, 32, 8, 128, tie_word_embeddings=False),
    "qwen3-30b-a3b": text_sizes(
        151936, 2048, 6144, 48, 32, 4, 128, model_type="qwen3_moe", tie_word_embeddings=False, **MOE
    ),
    "gpt-oss-20b": text_sizes(
        201088, 2880, 2880, 24, 64, 8, 64, model_type="gpt_oss", num_local_experts=32, tie_word_embeddings=False
    ),
    "tiny-vl": qwen3_vl(
        text_sizes(512, 128, 384, 4, 4, 2, 32),
        [8, 4, 4],
        1e4,
        range(500, 504),
        (2, 64, 128, 4, 4, 128),
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    ),
    "qwen3-vl-8b": qwen3_vl(
        text_sizes(151936, 4096, 12288, 36, 32, 8, 128),
        [24, 20, 20],
        5e6,
        (151652, 151653, 151655, 151656),
        (27, 1152, 4304, 16, 16, 4096),
        num_position_embeddings=2304,
        deepstack_visual_indexes=[8, 16, 24],
    ),
    "qwen3.5-9b": text_sizes(248320, 4096, 12288, 32, 16, 4, 256, **HYBRID),
    # The same FLOPs in heads of 128, for builds of flash-attn with that limit.
    "qwen3.5-9b-heads-128": text_sizes(248320, 4096, 12288, 32, 32, 8, 128, **HYBRID),
}


def config_of(name: str, **overrides: Any) -> PretrainedConfig:
    """Return the config of a shape; ``overrides`` apply to its text model."""
    shape = {"model_type": "qwen3", **SHAPES[name]}
    if "text_config" in shape:
        return AutoConfig.for_model(**{**shape, "text_config": {**shape["text_config"], **overrides}})
    return AutoConfig.for_model(**{**shape, **overrides})


def remember(model: nn.Module) -> nn.Module:
    """Initialize the decay of recurrent layers like a trained model's.

    transformers' initial decay erases the state within a token: the exponent of a chunk of 64 tokens reaches -1300, and
    fla's backward returns NaN, in stock verl too.
    """
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            nn.init.uniform_(weight, -5.0, -1.0)
    return model
