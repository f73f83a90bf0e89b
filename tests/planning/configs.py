"""Configs of Qwen3 checkpoints, without one."""

from benchmarks.shapes import config_of

WIDE = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
CONFIGS = {
    "0.6b": config_of("qwen3-0.6b"),
    "4b": config_of("qwen3-4b"),
    "8b": config_of("qwen3-8b"),
    "32b": config_of("qwen3-8b", **WIDE),
    "30b-a3b": config_of("qwen3-30b-a3b"),
}
