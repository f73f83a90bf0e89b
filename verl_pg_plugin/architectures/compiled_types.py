"""Architectures whose decoder layers are known to run under ``torch.compile``, and those known not to.

``tests/architectures/test_compiled_layers.py`` runs them; ``scripts/make_models_table.py`` keeps what it found.
"""

from __future__ import annotations

__all__ = ["BREAKING_TYPES", "COMPILED_TYPES", "NOT_ON_GPU", "ON_CPU_ALONE"]

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

ON_CPU_ALONE: frozenset[str] = frozenset({"ministral3"})
"""Compiled on a GPU too, where no recorded test has run them. Their layers have the same kinds of operators as those of
types with one, and have run on a CPU, in float32 and in bf16."""

NOT_ON_GPU: dict[str, str] = {
    **dict.fromkeys(
        (
            "gemma2",  # capped scores, without which flash-attn was built where the tests for a GPU ran
            "granitemoe",  # its experts are its own
            "qwen3_5_text",  # fla's recurrence
        ),
        "have been tested on a CPU only",
    ),
    **dict.fromkeys(
        ("ernie4_5", "ernie4_5_moe", "olmo2"),
        "take rotary angles in float32, and have been tested on a CPU only",
    ),
    **dict.fromkeys(
        ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        "have been tested on a CPU and in one small model on a GPU, where no speed was measured",
    ),
    "starcoder2": "are up to 1.19 times as far from float32 as stock rmpad (bf16, torch 2.11 on an H200)",
}
"""Why some of them stay uncompiled on a GPU, by model type.

``tests/architectures/test_gpu_models.py`` has run there what is neither here nor in ``ON_CPU_ALONE``: experts, which
take other kernels there than on a CPU (grouped products), and dense types.
"""

BREAKING_TYPES: dict[str, str] = {
    "apertus": "are 1e-4 off in a log-prob and 1e-5 in a gradient (torch 2.13 on a CPU)",
}
"""What goes wrong, by model type."""
