"""Softmax attention, the first mixer: transformers calls ours by name, so no layer is touched."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PretrainedConfig

from verl_pg_plugin.attention.interface import ATTENTION, ATTENTION_NAME, register_attention
from verl_pg_plugin.attention.kernels import AttentionNeeds

# Learned sinks enter the softmax next to the keys; nothing in their config or class says so. gpt-oss's are computed.
UNTRIED_SINK_MODEL_TYPES = frozenset({"deepseek_v4", "openai_privacy_filter"})
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class PairCost:
    """(query, key) pairs of some layers.

    Attributes:
        flops: forward FLOPs of one pair over all of them.
        window: keys that a query sees, itself included; None for all.
    """

    flops: float
    window: int | None = None


class Attention:
    """Causal attention over all earlier tokens or those in a sliding window.

    Attributes:
        name: the key in ``MIXERS`` and in ``AttentionContext.calls``.
        layer_types: entries of a config's ``layer_types`` that it computes.
        stateful_model_types: models that transformers calls stateful, whose state is that of its layers alone.
        ulysses: whether it mixes tokens of a Ulysses group.
        prefix_cache: whether it reads tokens that another micro-batch has computed; in a model with one that does not,
            each chunk of a split group computes what it shares again.
        padded_groups: whether it mixes the tokens of upstream's padded groups, and not packed ones only.
    """

    name: ClassVar[str] = ATTENTION
    layer_types: ClassVar[frozenset[str]] = frozenset({FULL, SLIDING})
    stateful_model_types: ClassVar[frozenset[str]] = frozenset()
    ulysses: ClassVar[bool] = True
    prefix_cache: ClassVar[bool] = True
    padded_groups: ClassVar[bool] = True

    def obstacles(self, config: PretrainedConfig) -> list[str]:
        """Why its layers in a model with this text config cannot share tokens; empty if they can."""
        reasons = []
        if config.model_type in UNTRIED_SINK_MODEL_TYPES:
            reasons.append(f"{config.model_type} adds learned attention sinks to the softmax")
        if getattr(config, "index_topk", None):
            reasons.append(f"{config.model_type} selects keys with a sparse-attention indexer")
        return reasons

    def machine_obstacles(self, device_name: str) -> list[str]:
        """What this machine lacks to run its layers, and the command that installs it.

        Nothing here: which kernel runs is an option with rules of its own.
        """
        return []

    def prepare(self, config: PretrainedConfig) -> None:
        """Change the config before the model is built from it."""
        register_attention()
        config._attn_implementation = ATTENTION_NAME

    def install(self, module: Any) -> None:
        """Make the layers of an unwrapped transformers model mix packed tokens.

        Nothing to do here: they look their attention up by the name in the config.
        """

    def pair_costs(self, config: PretrainedConfig) -> tuple[PairCost, ...]:
        """FLOPs that grow with pairs of tokens, of its layers in a model with this text config.

        Two per pair and number of a query for the score, two per number of a value for the output.
        """
        layers = Counter(attention_layer_types(config))
        windows = ((FULL, None), (SLIDING, getattr(config, "sliding_window", None)))
        return tuple(
            PairCost(2 * sum(_head_dims(config, kind)) * config.num_attention_heads * layers[kind], window)
            for kind, window in windows
            if layers[kind]
        )

    def token_flops(self, config: PretrainedConfig) -> float:
        """Forward FLOPs of one token over all of its layers, beside pairs and weights."""
        return 0.0


def attention_layer_types(config: PretrainedConfig) -> list[str]:
    """``FULL`` or ``SLIDING`` for every attention layer of a text config.

    Without ``layer_types``, transformers' models give ``sliding_window`` to every layer (Mistral, Mixtral, Phi3).
    """
    if types := getattr(config, "layer_types", None):
        return [layer_type for layer_type in types[: config.num_hidden_layers] if layer_type in Attention.layer_types]
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return [SLIDING if sliding else FULL] * config.num_hidden_layers


def attention_needs(config: PretrainedConfig) -> AttentionNeeds:
    """What the attention layers of a text config ask of a kernel.

    A config of the checkpoint's own may name its sizes otherwise: nothing is known to be needed, and the first forward
    tells.
    """
    known = getattr(config, "num_attention_heads", None) and getattr(config, "hidden_size", None)
    widths = {_head_dims(config, kind) for kind in (FULL, SLIDING)} if known else set()
    return AttentionNeeds(
        frozenset(widths),
        softcap=bool(getattr(config, "attn_logit_softcapping", None)),
    )


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
