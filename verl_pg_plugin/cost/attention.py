"""What one (query, key) pair of softmax attention costs, from a model's config."""

from collections import Counter

from transformers import PretrainedConfig

from verl_pg_plugin.mixers.protocol import PairCost

FULL, SLIDING = "full_attention", "sliding_attention"


def attention_pair_costs(config: PretrainedConfig) -> tuple[PairCost, ...]:
    """Layers with equal windows together: two FLOPs per head dim for the score, two for the weighted value.

    Layers of other types under ``layer_types`` cost nothing here. Without that field, transformers' models give
    ``sliding_window`` to every layer (Mistral, Mixtral, Phi3, Starcoder2) where it is set.

    Args:
        config: the text config.
    """
    window = getattr(config, "sliding_window", None) or None
    if not getattr(config, "use_sliding_window", True):
        window = None
    everywhere = [SLIDING if window else FULL] * config.num_hidden_layers
    layers = Counter(getattr(config, "layer_types", None) or everywhere)
    return tuple(
        PairCost(2 * sum(_head_dims(config, kind)) * config.num_attention_heads * layers[kind], seen)
        for kind, seen in ((FULL, None), (SLIDING, window))
        if layers[kind]
    )


def _head_dims(config: PretrainedConfig, kind: str) -> tuple[int, int]:
    """Sizes of a head's query and value; latent attention (DeepSeek) has two, Gemma 4 another one in full layers."""
    if getattr(config, "qk_nope_head_dim", None) is not None:
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    size = (kind == FULL and getattr(config, "global_head_dim", None)) or getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    return size, size
