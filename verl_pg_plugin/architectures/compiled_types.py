"""Architectures whose decoder layers are known to run under ``torch.compile``, and those known not to.

``tests/architectures/test_compiled_layers.py`` runs them; ``scripts/make_models_table.py`` keeps what it found.
"""

from __future__ import annotations

__all__ = ["BREAKING_TYPES", "COMPILED_TYPES", "UNTRIED_ON_GPU"]

COMPILED_TYPES: frozenset[str] = frozenset(
    {
        "afmoe",
        "arcee",
        "bitnet",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "granite",
        "granitemoe",
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
"""As exact compiled as they are uncompiled, and compiled once while micro-batches change."""

UNTRIED_ON_GPU: frozenset[str] = frozenset(
    {
        "qwen3_5_text",  # fla's recurrence
        *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),  # pictures
    }
)
"""Those of them that take other kernels on a GPU than on the CPU where they were held to the numbers.

Experts do too (grouped products); ``tests/architectures/test_gpu_models.py`` has run all of those compiled on a GPU.
"""

BREAKING_TYPES: dict[str, str] = {
    "apertus": "are 1e-4 off in a log-prob and 1e-5 in a gradient (torch 2.13 on a CPU)",
}
"""What goes wrong, by model type."""
