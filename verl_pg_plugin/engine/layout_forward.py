"""Inputs and outputs of one forward over a layout: rows into the model, values back onto verl's jagged positions."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from verl_pg_plugin.attention import PackedAttention
from verl_pg_plugin.attention.gather import to_device
from verl_pg_plugin.attention.grouped_attention import PaddedGroups
from verl_pg_plugin.engine.padded_layout import PaddedLayout
from verl_pg_plugin.layout import PackedLayout

Layout: TypeAlias = PackedLayout | PaddedLayout


@dataclass(frozen=True)
class LayoutForward:
    """A layout on the device, ready for the model.

    Shape legend: G lines of S rows (packed: one line), N head rows, W columns that hold head rows, M response tokens.

    Attributes:
        attention: what the attention layers need.
        input_ids, position_ids: (G, S) int64.
        head_columns: (W,) int64 columns the head runs on.
        head_index: (N,) int64 place of each head row in those columns of all lines; None if they are the head rows.
        labels: (N,) int64 label of each head row.
        response_index, response_head: (M,) int64, see ``PackedLayout``.
        num_logical_tokens: length of verl's jagged values.
    """

    attention: PackedAttention | PaddedGroups
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    head_columns: torch.Tensor
    head_index: torch.Tensor | None
    labels: torch.Tensor
    response_index: torch.Tensor
    response_head: torch.Tensor
    num_logical_tokens: int

    @classmethod
    def from_layout(
        cls, layout: Layout, attention: PackedAttention | PaddedGroups, device: torch.device | str
    ) -> "LayoutForward":
        """Move what a forward needs to ``device``."""

        def move(array: np.ndarray) -> torch.Tensor:
            return to_device(array, torch.int64, device)

        input_ids = np.atleast_2d(layout.input_ids)
        num_lines, line_length = input_ids.shape
        head_columns, head_index = layout.head_rows, None
        if num_lines > 1:
            line, column = np.divmod(layout.head_rows, line_length)
            head_columns, place = np.unique(column, return_inverse=True)
            head_index = move(line * len(head_columns) + place)
        return cls(
            attention=attention,
            input_ids=move(input_ids),
            position_ids=move(np.atleast_2d(layout.position_ids)),
            head_columns=move(head_columns),
            head_index=head_index,
            labels=move(layout.labels.reshape(-1)[layout.head_rows]),
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

    def at_head_rows(self, x_GWV: torch.Tensor) -> torch.Tensor:
        """(N, V) head rows out of ``head_columns`` of all lines."""
        x_NV = x_GWV.flatten(0, 1)
        return x_NV if self.head_index is None else x_NV.index_select(0, self.head_index)

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
