"""Bytes that a row takes on the device, to hold carried rows against rows that are computed."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from verl_pg_plugin.batching.chain_cuts import CarryWeights


@dataclass(frozen=True)
class RowMemory:
    """Bytes over all layers of a model.

    Attributes:
        activations: what the forward of a computed row keeps for its backward.
        key_value: its keys and values.
        sums: float32 sums of the gradients of both.
    """

    activations: int
    key_value: int
    sums: int

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
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads or 1
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        kept = hidden
        if not checkpointing:  # inputs of the norms and matrices, queries, keys, values, and the MLP's three
            kept = 4 * hidden + (2 * heads + 2 * kv_heads) * head_dim + 3 * (config.intermediate_size or hidden)
        attention = heads * (head_dim * dtype.itemsize + 4) if checkpointing and keeps_attention else 0
        numbers, layers = 2 * kv_heads * head_dim, config.num_hidden_layers
        return cls(
            activations=layers * (kept * dtype.itemsize + attention),
            key_value=layers * numbers * dtype.itemsize,
            sums=layers * numbers * max(dtype.itemsize, 4),
        )

    def weights(self, forward_only: bool) -> CarryWeights:
        """What a carried row and one handed over take of a budget of computed rows."""
        if forward_only:
            return CarryWeights(self.key_value / self.activations, self.key_value / self.activations)
        return CarryWeights((self.key_value + self.sums) / self.activations, self.sums / self.activations)
