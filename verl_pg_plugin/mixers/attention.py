"""Softmax attention as a mixer; transformers calls ours by name, so layers do not change."""

from collections import Counter

from transformers import PretrainedConfig

from verl_pg_plugin.attention.context import heads_obstacle
from verl_pg_plugin.attention.interface import ATTENTION, ATTENTION_NAME
from verl_pg_plugin.attention.kernels import AttentionNeeds
from verl_pg_plugin.mixers.layer_types import FULL, SLIDING, layer_types
from verl_pg_plugin.mixers.mixer import Mixer, PairCost


def obstacles(config: PretrainedConfig) -> list[str]:
    has_indexer = getattr(config, "index_topk", None)
    return [f"{config.model_type} selects keys with a sparse-attention indexer"] if has_indexer else []


def prepare(config: PretrainedConfig) -> None:
    config._attn_implementation = ATTENTION_NAME


def ulysses_obstacle(config: PretrainedConfig, ranks: int) -> str:
    heads = getattr(config, "num_attention_heads", 0)  # 0: a custom config names them otherwise
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads_obstacle(heads, kv_heads, ranks) if heads else ""


def pair_costs(config: PretrainedConfig) -> tuple[PairCost, ...]:
    """Two FLOPs for each pair and query element (scores), and for each pair and value element (output)."""
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


def attention_needs(config: PretrainedConfig) -> AttentionNeeds:
    """Return what the attention layers of a text config need from a kernel.

    Head sizes are empty for a custom config that names them otherwise: the kernel then checks them in the forward.
    """
    try:
        widths = {_head_dims(config, kind) for kind in (FULL, SLIDING)}
    except (AttributeError, TypeError, ZeroDivisionError):
        widths = set()
    softcap = bool(getattr(config, "attn_logit_softcapping", None))
    return AttentionNeeds(frozenset(widths), softcap, SLIDING in layer_types(config))


def _head_dims(config: PretrainedConfig, kind: str) -> tuple[int, int]:
    """Return a head's key and value widths: MLA (DeepSeek) has two, Gemma 4 another in full attention."""
    if layers := getattr(config, "per_layer_config", None):  # the only source of widths since transformers 5.22
        types = getattr(config, "layer_types", None) or [kind]
        config = layers[types.index(kind) if kind in types else 0]
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    size = (kind == FULL and getattr(config, "global_head_dim", None)) or getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    return size, size
