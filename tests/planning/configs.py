"""Sizes of Qwen3 checkpoints, without one."""

from transformers import Qwen3Config, Qwen3MoeConfig

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
DEEP = {"num_hidden_layers": 36, **HEADS}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
CONFIGS = {
    "4b": Qwen3Config(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True, **DEEP),
    "8b": Qwen3Config(hidden_size=4096, intermediate_size=12288, **DEEP),
    "32b": Qwen3Config(
        hidden_size=5120, intermediate_size=25600, **{**DEEP, "num_hidden_layers": 64, "num_attention_heads": 64}
    ),
    "30b-a3b": Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        **{**DEEP, "num_hidden_layers": 48, "num_key_value_heads": 4},
        **EXPERTS,
    ),
}
