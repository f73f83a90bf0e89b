"""Inputs and outputs of one packed forward: rows into the model, values back onto verl's jagged positions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_pg_plugin.attention import PackedAttention, VarlenKernel
from verl_pg_plugin.attention.gather import to_device
from verl_pg_plugin.layout import PackedLayout


@dataclass(frozen=True)
class PackedForward:
    """A layout on the device, ready for the model. Legend: see ``PackedLayout``.

    Attributes:
        attention: what the attention layers need.
        input_ids, position_ids: (1, T) int64.
        head_rows: (N,) int64 rows the head runs on.
        labels: (N,) int64 label of each head row.
        response_index, response_head: (M,) int64.
        num_logical_tokens: length of verl's jagged values.
    """

    attention: PackedAttention
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    head_rows: torch.Tensor
    labels: torch.Tensor
    response_index: torch.Tensor
    response_head: torch.Tensor
    num_logical_tokens: int

    @classmethod
    def from_layout(cls, layout: PackedLayout, kernel: VarlenKernel, device: torch.device | str) -> "PackedForward":
        """Move what a forward needs to ``device``."""

        def move(array: np.ndarray) -> torch.Tensor:
            return to_device(array, torch.int64, device)

        return cls(
            attention=PackedAttention.from_layout(layout, kernel, device),
            input_ids=move(layout.input_ids).unsqueeze(0),
            position_ids=move(layout.position_ids).unsqueeze(0),
            head_rows=move(layout.head_rows),
            labels=move(layout.labels[layout.head_rows]),
            response_index=move(layout.response_index),
            response_head=move(layout.response_head),
            num_logical_tokens=layout.num_logical_tokens,
        )

    def model_inputs(self) -> dict[str, Any]:
        """Keywords of a transformers decoder's ``forward``."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": None,
            "prefix_grouper": self.attention,
        }

    def to_jagged(self, values_N: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Spread values of head rows over the sequences, as verl reads them.

        Args:
            values_N: (N,) one value per head row.
            offsets: (B+1,) of verl's jagged ``input_ids``.

        Returns:
            Jagged (B, length); positions that verl never reads hold zero.
        """
        flat = values_N.new_zeros(self.num_logical_tokens)
        flat = flat.index_copy(0, self.response_index, values_N.index_select(0, self.response_head))
        return torch.nested.nested_tensor_from_jagged(flat, offsets)
