"""The rows of one forward on the device: what goes into the model, and values back onto verl's jagged positions."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_pg_plugin.attention.carried_rows import Carrying
from verl_pg_plugin.attention.gather import send, to_device
from verl_pg_plugin.attention.shared_rows import SharedRows
from verl_pg_plugin.engine.batch.row_shard import RowShard
from verl_pg_plugin.layout import PackedLayout, PaddedLayout
from verl_pg_plugin.modalities import ContentInputs


@dataclass(frozen=True)
class ForwardRows:
    """A layout on the device, ready for the model.

    Shape legend: G lines of S rows (packed: one line), N head rows of this rank, W columns that hold them, A head rows
    of all ranks that share the rows, M response tokens.

    Attributes:
        shared: what the layers that mix tokens are handed.
        input_ids, position_ids: (G, S) int64; positions of P dimensions are (P, G, S). Of all ranks' rows where the
            model takes its own part itself, see ``content``.
        head_columns: (W,) int64 columns the head runs on.
        head_index: (N,) int64 place of each head row in those columns of all lines; None if they are the head rows.
        labels: (N,) int64 label of each head row.
        head_sequence: (N,) int64 a sequence that contains it.
        shard: this rank's part of packed rows.
        all_head_rows: (A,) int64 head rows of all ranks; None where this rank has them all.
        response_index, response_head: (M,) int64, see ``PackedLayout``.
        num_logical_tokens: length of verl's jagged values.
        carrying: rows of other micro-batches that these read; None for none.
        content: what the model reads beside tokens, by keyword; with any, the model slices rows of ranks itself.
    """

    shared: SharedRows
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    head_columns: torch.Tensor
    head_index: torch.Tensor | None
    labels: torch.Tensor
    head_sequence: torch.Tensor
    shard: RowShard
    all_head_rows: torch.Tensor | None
    response_index: torch.Tensor
    response_head: torch.Tensor
    num_logical_tokens: int
    carrying: Carrying | None = None
    content: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def from_packed(
        cls,
        layout: PackedLayout,
        shared: SharedRows,
        shard: RowShard,
        device: torch.device | str,
        carrying: Carrying | None = None,
        content: ContentInputs | None = None,
    ) -> "ForwardRows":
        """Move what a forward over this rank's packed rows needs to ``device``."""

        def move(array: np.ndarray) -> torch.Tensor:
            return to_device(array, torch.int64, device)

        own = shard.own(layout.head_index)
        # A head never runs on nothing: a rank without head rows computes its first row, which nobody reads.
        columns = layout.head_index[own] - shard.start if len(own) else np.zeros(1, dtype=np.int64)
        input_ids, position_ids, tensors = layout.input_ids, layout.position_ids, {}
        if content is None:
            input_ids, position_ids = shard.take(input_ids), shard.take(position_ids)
        else:
            tensors = {name: send(tensor, device) for name, tensor in content.tensors.items()}
            input_ids = shard.pad(np.append(input_ids, content.padding_ids))
            position_ids = shard.pad(position_ids)
        return cls(
            shared=shared,
            input_ids=move(input_ids[None]),
            position_ids=move(position_ids[..., None, :]),
            head_columns=move(columns),
            head_index=None,
            labels=move(shard.take(layout.labels)[columns]),
            head_sequence=move(layout.head_sequence[own] if len(own) else np.zeros(1, dtype=np.int64)),
            shard=shard,
            all_head_rows=move(layout.head_index) if shard.group else None,
            response_index=move(layout.response_index),
            response_head=move(layout.response_head),
            num_logical_tokens=layout.num_logical_tokens,
            carrying=carrying,
            content=tensors,
        )

    @classmethod
    def from_padded_groups(cls, layout: PaddedLayout, shared: SharedRows, device: torch.device | str) -> "ForwardRows":
        """Move what a forward over padded lines needs to ``device``."""

        def move(array: np.ndarray) -> torch.Tensor:
            return to_device(array, torch.int64, device)

        line, column = np.divmod(layout.head_index, layout.input_ids.shape[1])
        head_columns, place = np.unique(column, return_inverse=True)
        return cls(
            shared=shared,
            input_ids=move(layout.input_ids),
            position_ids=move(layout.position_ids),
            head_columns=move(head_columns),
            head_index=move(line * len(head_columns) + place),
            labels=move(layout.labels.reshape(-1)[layout.head_index]),
            head_sequence=move(layout.head_sequence),
            shard=RowShard(layout.num_tokens),
            all_head_rows=None,
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
            "prefix_grouper": self.shared,
            **self.content,
        }

    def at_head_rows(self, x_GWV: torch.Tensor) -> torch.Tensor:
        """(N, V) head rows out of ``head_columns`` of all lines."""
        x_NV = x_GWV.flatten(0, 1)
        return x_NV if self.head_index is None else x_NV.index_select(0, self.head_index)

    def of_all_ranks(self, x_NC: torch.Tensor) -> torch.Tensor:
        """(A, C) values of the head rows of all ranks that share the rows, a collective; carried ones first."""
        if self.all_head_rows is not None:
            x_LC = x_NC.new_zeros(self.shard.num_rows, x_NC.shape[-1]).index_copy(0, self.head_columns, x_NC)
            x_NC = self.shard.gather(x_LC).index_select(0, self.all_head_rows)
        return x_NC if self.carrying is None else self.carrying.join_columns(x_NC)

    def to_jagged(self, values_A: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Spread values of head rows over the sequences, as verl reads them.

        Args:
            values_A: (A,) one value per head row of all ranks.
            offsets: (B+1,) of verl's jagged ``input_ids``.

        Returns:
            Jagged (B, length); positions that verl never reads hold zero.
        """
        flat = values_A.new_zeros(self.num_logical_tokens)
        flat = flat.index_copy(0, self.response_index, values_A.index_select(0, self.response_head))
        return torch.nested.nested_tensor_from_jagged(flat, offsets)
