"""How layers let tokens see earlier ones, over packed tokens; a new way is its file and its line in ``MIXERS``.

A layer that mixes tokens hands what it returns through ``AttentionContext.mixed``, outside of compiled code
(``torch.compiler.disable``): index maps differ in every micro-batch.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from transformers import PretrainedConfig

from verl_pg_plugin.mixers.attention import FULL, Attention, PairCost
from verl_pg_plugin.mixers.gated_delta import GatedDelta

__all__ = ["MIXERS", "Mixer", "PairCost", "count_layers", "stateful_model_types", "unknown_layer_types"]

Mixer: TypeAlias = Attention | GatedDelta

MIXERS: dict[str, Mixer] = {mixer.name: mixer for mixer in (Attention(), GatedDelta())}
"""Every mixer by name; a layer type belongs to the first that claims it."""


def count_layers(config: PretrainedConfig) -> Counter[str]:
    """Layers of a text config by the name of their mixer; those that no mixer claims are left out."""
    return Counter(
        mixer.name
        for layer_type in _layer_types(config)
        for mixer in MIXERS.values()
        if layer_type in mixer.layer_types
    )


def unknown_layer_types(config: PretrainedConfig) -> list[str]:
    """Layer types of a text config that no mixer claims, sorted."""
    return sorted(set(_layer_types(config)).difference(*(mixer.layer_types for mixer in MIXERS.values())))


def stateful_model_types() -> frozenset[str]:
    """Models with a recurrent state that a mixer hands from parents to children."""
    return frozenset().union(*(mixer.stateful_model_types for mixer in MIXERS.values()))


def _layer_types(config: PretrainedConfig) -> list[str]:
    num_layers = getattr(config, "num_hidden_layers", 0)
    types = getattr(config, "layer_types", None)
    return list(types)[:num_layers] if types else [FULL] * num_layers
