"""Softmax attention, the first mixer: transformers calls ours by name, so no layer is touched."""

from collections import Counter

from transformers import PretrainedConfig

from verl_pg_plugin.attention.context import heads_obstacle
from verl_pg_plugin.attention.interface import ATTENTION, ATTENTION_NAME
from verl_pg_plugin.attention.kernels import AttentionNeeds
from verl_pg_plugin.mixers.mixer import Mixer, PairCost

FULL, SLIDING = "full_attention", "sliding_attention"


def obstacles(config: PretrainedConfig) -> list[str]:
    has_indexer = getattr(config, "index_topk", None)
    return [f"{config.model_type} selects keys with a sparse-attention indexer"] if has_indexer else []


def prepare(config: PretrainedConfig) -> None:
    config._attn_implementation = ATTENTION_NAME


def ulysses_obstacle(config: PretrainedConfig, ranks: int) -> str:
    heads = getattr(config, "num_attention_heads", 0)  # 0: a config of the checkpoint's own names them otherwise
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads_obstacle(heads, kv_heads, ranks) if heads else ""


def pair_costs(config: PretrainedConfig) -> tuple[PairCost, ...]:
    """Two FLOPs per pair and number of a query for the score, two per number of a value for the output."""
    layers = Counter(layer_types(config))
    windows = ((FULL, None), (SLIDING, getattr(config, "sliding_window", None)))
    return tuple(
        PairCost(2.0 * sum(_head_dims(config, kind)) * config.num_attention_heads * layers[kind], window)
        for kind, window in windows
        if layers[kind]
    )


MIXER = Mixer(
    name=ATTENTION,
    layer_types=frozenset({FULL, SLIDING}),
    obstacles=obstacles,
    prepare=prepare,
    pair_costs=pair_costs,
    ulysses_obstacle=ulysses_obstacle,
    prefix_cache=True,
    padded_groups=True,
)
"""Causal attention over all earlier tokens or those in a sliding window."""


def attention_needs(config: PretrainedConfig) -> AttentionNeeds:
    """What the attention layers of a text config ask of a kernel.

    A config of the checkpoint's own may name its sizes otherwise: nothing is known to be needed; a forward tells.
    """
    known = getattr(config, "num_attention_heads", None) and getattr(config, "hidden_size", None)
    widths = {_head_dims(config, kind) for kind in (FULL, SLIDING)} if known else set()
    softcap = bool(getattr(config, "attn_logit_softcapping", None))
    return AttentionNeeds(frozenset(widths), softcap, SLIDING in layer_types(config))


def layer_types(config: PretrainedConfig) -> list[str]:
    """Of every layer; transformers gives ``sliding_window`` to all where there are none (Mistral, Mixtral, Phi3)."""
    num_layers = getattr(config, "num_hidden_layers", 0)
    if types := getattr(config, "layer_types", None):
        return list(types)[:num_layers]
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return [SLIDING if sliding else FULL] * num_layers


def _head_dims(config: PretrainedConfig, kind: str) -> tuple[int, int]:
    """Widths of a head's keys and values; latent attention (DeepSeek) has two, Gemma 4 another one in full layers."""
    if layers := getattr(config, "per_layer_config", None):  # which alone tells widths, since transformers 5.22
        types = getattr(config, "layer_types", None) or [kind]
        config = layers[types.index(kind) if kind in types else 0]
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    size = (kind == FULL and getattr(config, "global_head_dim", None)) or getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    return size, size
