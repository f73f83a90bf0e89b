"""Bytes that a row takes on the device, to hold carried rows and copied keys against rows that are computed."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PretrainedConfig

from verl_pg_plugin.batching.chain_cuts import CarryWeights
from verl_pg_plugin.batching.copied_keys import CopiedKeys
from verl_pg_plugin.mixers.attention import FULL, attention_layer_types, attention_needs


@dataclass(frozen=True)
class RowMemory:
    """Bytes over all layers of a model, or of one where it says so.

    Attributes:
        activations: what the forward of a computed row keeps for its backward.
        key_value: its keys and values.
        sums: float32 sums of the gradients of both.
        attention: the part of ``activations`` that can be computed again instead, layer by layer.
        copy: a key and its value that attention copies, in one layer.
        copies_kept: layers whose copies live until the backward; 1 where it makes them again, layer by layer.
        copy_gradients: what one layer's backward holds of a copy's gradients.
        mlp: what the MLP of one layer keeps of a row for its backward.
        reads_trunks: the backward of every layer reads the trunks of tries where they lie, see ``layout.trunk_reads``.
    """

    activations: int
    key_value: int
    sums: int
    attention: int = 0
    copy: int = 0
    copies_kept: int = 1
    copy_gradients: int = 0
    mlp: int = 0
    reads_trunks: bool = False

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        dtype: torch.dtype,
        checkpointing: bool,
        keeps_attention: bool,
        kernel: str = "flash_attn_2",
    ) -> "RowMemory":
        """Count from the sizes in a text config.

        Args:
            config: every layer counts as attention.
            dtype: of activations.
            checkpointing: layers keep their input and compute the rest again.
            keeps_attention: they keep attention's output and its log-sum-exp too.
            kernel: of attention, one of ``KERNELS``.
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
        mlp = 3 * int(np.mean(getattr(config, "intermediate_size", None) or 4 * hidden))
        kept = hidden
        if not checkpointing:  # inputs of the norms and matrices, queries, keys, values, output, and the MLP's three
            kept = 4 * hidden + heads * (key_width + value_width) + numbers + mlp
        attention = heads * (value_width * dtype.itemsize + 4) if checkpointing and keeps_attention else 0
        return cls(
            activations=layers * (kept * dtype.itemsize + attention),
            key_value=layers * numbers * dtype.itemsize,
            sums=layers * numbers * max(dtype.itemsize, 4),
            attention=layers * attention,
            copy=numbers * dtype.itemsize,
            copies_kept=1 if checkpointing else layers,
            copy_gradients=_gradients_of_a_copy(heads, kv_heads, key_width + value_width, dtype, kernel),
            mlp=mlp * dtype.itemsize,
            reads_trunks=False and set(attention_layer_types(config)) == {FULL},
        )

    def copies(self, forward_only: bool) -> CopiedKeys:
        """What copied keys take of a budget of computed rows.

        A row's own key is free, since rows that share nothing have it too, and so are as many more as fit into what the
        MLP of one layer takes at its peak, its three and in a backward their gradients, which is gone by then: with
        flash_attn_2 at the shape of Qwen3-4B 5.75 keys per row of an update and 15 of log-probs.
        """
        if forward_only:  # a layer drops its copies whether checkpointed or not
            copy, mlp = self.copy, self.mlp
        else:
            copy, mlp = self.copies_kept * self.copy + self.copy_gradients, 2 * self.mlp
        if not copy:
            return CopiedKeys()
        without_gradients = self.copies(forward_only=True) if self.reads_trunks and not forward_only else None
        return CopiedKeys(copy / self.activations, 1 + mlp / copy, without_gradients)

    def weights(self, forward_only: bool) -> CarryWeights:
        """What a carried row and one handed over take of a budget of computed rows."""
        if forward_only:  # nothing is kept of a computed row
            return CarryWeights(self.key_value / self.activations, self.key_value / self.activations, recomputing=0.0)
        return CarryWeights(
            carried=(self.key_value + self.sums) / self.activations,
            owed=self.sums / self.activations,
            recomputing=1 - self.attention / self.activations,
        )


def _gradients_of_a_copy(heads: int, kv_heads: int, width: int, dtype: torch.dtype, kernel: str) -> int:
    """Bytes of what the backward returns for a key and its value, and of what it adds up before.

    Measured on an H200 (docs/data/attention.csv, 8192,2048,16): the peaks of flash_attn_2 and flash_attn_4 differ by
    1.31 GiB, and what this says by 1.31.
    """
    if heads == kv_heads:
        return kv_heads * width * dtype.itemsize
    summed = heads * dtype.itemsize if kernel in ("flash_attn_2", "torch_varlen") else kv_heads * 4
    return width * (kv_heads * dtype.itemsize + summed)
