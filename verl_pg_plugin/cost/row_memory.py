"""Bytes that a row takes on the device, to hold carried rows against rows that are computed."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PretrainedConfig

from verl_pg_plugin.batching.chain_cuts import CarryWeights
from verl_pg_plugin.mixers.attention import attention_needs


@dataclass(frozen=True)
class RowMemory:
    """Bytes over all layers of a model.

    Attributes:
        activations: what the forward of a computed row keeps for its backward.
        key_value: its keys and values.
        sums: float32 sums of the gradients of both.
        attention: the part of ``activations`` that can be computed again instead, layer by layer.
    """

    activations: int
    key_value: int
    sums: int
    attention: int = 0

    @classmethod
    def of(
        cls, config: PretrainedConfig, dtype: torch.dtype, checkpointing: bool, keeps_attention: bool
    ) -> "RowMemory":
        """Count from the sizes in a text config.

        Args:
            config: every layer counts as attention.
            dtype: of activations.
            checkpointing: layers keep their input and compute the rest again.
            keeps_attention: they keep attention's output and its log-sum-exp too.
        """
        hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        if not hidden or not heads:
            return cls(
                activations=1, key_value=1, sums=2
            )  # as where every query has a key of its own: the most there is
        layers = config.num_hidden_layers
        kv_heads = int(np.mean(getattr(config, "num_key_value_heads", None) or heads))  # a list where layers differ
        key_width, value_width = max(attention_needs(config).head_dims)
        numbers = kv_heads * (key_width + value_width)
        kept = hidden
        if not checkpointing:  # inputs of the norms and matrices, queries, keys, values, output, and the MLP's three
            wide = int(np.mean(getattr(config, "intermediate_size", None) or 4 * hidden))
            kept = 4 * hidden + heads * (key_width + value_width) + numbers + 3 * wide
        attention = heads * (value_width * dtype.itemsize + 4) if checkpointing and keeps_attention else 0
        return cls(
            activations=layers * (kept * dtype.itemsize + attention),
            key_value=layers * numbers * dtype.itemsize,
            sums=layers * numbers * max(dtype.itemsize, 4),
            attention=layers * attention,
        )

    def weights(self, forward_only: bool) -> CarryWeights:
        """What a carried row and one handed over take of a budget of computed rows."""
        if forward_only:  # nothing is kept of a computed row
            return CarryWeights(self.key_value / self.activations, self.key_value / self.activations, recomputing=0.0)
        return CarryWeights(
            carried=(self.key_value + self.sums) / self.activations,
            owed=self.sums / self.activations,
            recomputing=1 - self.attention / self.activations,
        )
