"""What a layer holds if its backward is to recompute nothing, what that saves, and how many layers fit a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from verl_pg_plugin.mixers.attention import attention_needs


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that a row of one compiled attention layer holds beside what checkpointing holds anyway, by part.

    What checkpointing holds is the layer's input and attention's output. A kept layer adds what goes from graph to
    graph (attention and the last product stand between them), the outputs of matrices that a backward reads, the sum in
    front of the MLP, and a float32 number for each norm; the rest is computed again where it is read. Exact for layers
    of Qwen3 that torch 2.13 compiles; one that is not compiled holds more.

    Attributes:
        projections: their input, queries and keys in front of their norms and behind the rotary embedding, and values.
        mlp: the sum in front of it and its norm, two products, and what the last product reads.
        flops_of_projections, flops_of_mlp: that the backward spends on computing them again.
    """

    projections: int
    mlp: int
    flops_of_projections: float
    flops_of_mlp: float

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> LayerActivations:
        """Count from the sizes in a text config; every layer counts as attention with a gated MLP.

        Args:
            config: with ``hidden_size``, ``num_attention_heads`` and ``intermediate_size``.
            dtype: of activations.
        """
        hidden, heads = config.hidden_size, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        key_width, value_width = max(attention_needs(config).head_dims)
        queries_and_keys, values = (heads + kv_heads) * key_width, kv_heads * value_width
        inner = config.intermediate_size
        return cls(
            projections=(hidden + 2 * queries_and_keys + values) * dtype.itemsize + 4 * (1 + heads + kv_heads),
            mlp=(2 * hidden + 3 * inner) * dtype.itemsize + 4,
            flops_of_projections=2.0 * hidden * (queries_and_keys + values + heads * value_width),
            flops_of_mlp=4.0 * hidden * inner,
        )

    @property
    def bytes(self) -> int:
        """Of the whole layer."""
        return self.projections + self.mlp

    @property
    def flops(self) -> float:
        """Of the whole layer."""
        return self.flops_of_projections + self.flops_of_mlp


@dataclass(frozen=True)
class KeptBudget:
    """``prefix_grouper.keep_activations`` of a model whose layers are all alike.

    Attributes:
        layer: what one holds.
        num_layers: of the model.
        gib: that layers may hold; infinite for ``all``.
    """

    layer: LayerActivations
    num_layers: int
    gib: float

    def layers(self, rows: int) -> int:
        """How many a micro-batch of so many rows keeps."""
        if math.isinf(self.gib):
            return self.num_layers
        return int(min(self.num_layers, self.gib * 2**30 // (rows * self.layer.bytes)))

    def held(self, rows: int) -> int:
        """Bytes that these hold."""
        return self.layers(rows) * rows * self.layer.bytes


def last_that_fit(bytes_of_layers: Sequence[float], budget: float) -> frozenset[int]:
    """The most layers from the last one on that hold no more than ``budget`` bytes together.

    Args:
        bytes_of_layers: what each would hold, in the order in which they run.
    """
    kept: set[int] = set()
    for place in reversed(range(len(bytes_of_layers))):
        budget -= bytes_of_layers[place]
        if budget < 0:
            break
        kept.add(place)
    return frozenset(kept)


def last_of_each(kinds: Sequence[object], known: Callable[[object], bool]) -> frozenset[int]:
    """The last layer of every kind that is not ``known``."""
    return frozenset({kind: place for place, kind in enumerate(kinds) if not known(kind)}.values())
