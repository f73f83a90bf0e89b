"""Token mixing over packed tokens. A new mixer is a file and an entry in ``MIXERS``.

A layer that mixes tokens passes its output through ``ForwardContext.mixed``, outside of compiled code
(``torch.compiler.disable``): index maps differ in every micro-batch.
"""

from collections import Counter

from transformers import PretrainedConfig

from verl_pg_plugin.mixers import attention, gated_delta, mamba2
from verl_pg_plugin.mixers.layer_types import layer_types
from verl_pg_plugin.mixers.mixer import Mixer, PairCost

__all__ = ["MIXERS", "Mixer", "PairCost", "count_layers", "stateful_model_types", "unknown_layer_types"]

MIXERS: dict[str, Mixer] = {mixer.name: mixer for mixer in (attention.MIXER, gated_delta.MIXER, mamba2.MIXER)}


def count_layers(config: PretrainedConfig) -> Counter[str]:
    """Count the layers of a text config by mixer; layer types without a mixer are left out."""
    names = {layer_type: mixer.name for mixer in MIXERS.values() for layer_type in mixer.layer_types}
    return Counter(names[layer_type] for layer_type in layer_types(config) if layer_type in names)


def unknown_layer_types(config: PretrainedConfig) -> list[str]:
    """Return the sorted layer types of a text config that have no mixer."""
    return sorted(set(layer_types(config)).difference(*(mixer.layer_types for mixer in MIXERS.values())))


def stateful_model_types() -> frozenset[str]:
    """Return models whose recurrent state a mixer passes from parent segments to children."""
    return frozenset().union(*(mixer.stateful_model_types for mixer in MIXERS.values()))
