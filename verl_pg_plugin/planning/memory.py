"""Bytes that a token takes on the device, to hold cached tokens of a split group against tokens that are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verl_pg_plugin.mixers.attention import attention_needs
from verl_pg_plugin.planning.micro_batches import CacheWeights

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class TokenMemory:
    """Bytes over all layers of a model.

    Attributes:
        activations: what the forward of a computed token keeps for its backward.
        key_value: its keys and values.
        sums: float32 sums of the gradients of both.
        attention: the part of ``activations`` that can be computed again instead, layer by layer.
    """

    activations: int
    key_value: int
    sums: int
    attention: int = 0

    @classmethod
    def of(cls, config: PretrainedConfig, itemsize: int, checkpointing: bool, keeps_attention: bool) -> TokenMemory:
        """Count from the sizes in a text config.

        Args:
            config: every layer counts as attention.
            itemsize: bytes of a number of the activations.
            checkpointing: layers keep their input and compute the rest again.
            keeps_attention: they keep attention's output and its log-sum-exp too.
        """
        hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        if not hidden or not heads:  # as where every query has a key of its own: the most there is
            return cls(activations=1, key_value=1, sums=2)
        layers = config.num_hidden_layers
        kv_heads = int(np.mean(getattr(config, "num_key_value_heads", None) or heads))  # a list where layers differ
        key_width, value_width = max(attention_needs(config).head_dims)
        numbers = kv_heads * (key_width + value_width)
        kept = hidden
        if not checkpointing:  # inputs of the norms and matrices, queries, keys, values, output, and the MLP's three
            mlp = 3 * int(np.mean(getattr(config, "intermediate_size", None) or 4 * hidden))
            kept = 4 * hidden + heads * (key_width + value_width) + numbers + mlp
        attention = heads * (value_width * itemsize + 4) if checkpointing and keeps_attention else 0
        return cls(
            activations=layers * (kept * itemsize + attention),
            key_value=layers * numbers * itemsize,
            sums=layers * numbers * max(itemsize, 4),
            attention=layers * attention,
        )

    def weights(self, forward_only: bool) -> CacheWeights:
        """What a cached token and a published one take of a budget of computed tokens."""
        if forward_only:  # nothing is kept of a computed token
            return CacheWeights(self.key_value / self.activations, self.key_value / self.activations, recomputing=0.0)
        return CacheWeights(
            cached=(self.key_value + self.sums) / self.activations,
            published=self.sums / self.activations,
            recomputing=1 - self.attention / self.activations,
        )
