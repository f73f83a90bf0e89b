"""What verl's loop over micro-batches gives the model and takes from it: shared rows in, jagged outputs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from verl_pg_plugin.engine.batch.layout_field import layout_of
from verl_pg_plugin.engine.forward_rows import ForwardRows
from verl_pg_plugin.engine.shared_model import SharedModel
from verl_pg_plugin.engine.sharing_modes import SharingMode
from verl_pg_plugin.engine.steps.carry import Carrier
from verl_pg_plugin.engine.steps.meetings import Meetings


class ModelPasses:
    """Overrides the engine that it is a base of where verl prepares a model's inputs and its outputs."""

    sharing: SharingMode | None
    shared_model: SharedModel
    carrier: Carrier | None
    meetings: Meetings | None
    ulysses_sequence_parallel_size: int

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        if self.sharing is None:
            return super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        inputs = self.inputs_of(micro_batch)
        if self.meetings is not None:
            self.meetings.before_collectives()
        return inputs

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Callable | None
    ) -> dict[str, torch.Tensor]:
        if self.sharing is None:
            stock = super().prepare_model_outputs  # type: ignore[misc]
            return stock(output, output_args, micro_batch, logits_processor_func)
        if self.meetings is not None:
            self.meetings.after_collectives()
        return self.outputs_of(output, output_args, micro_batch)

    def inputs_of(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        """What the model reads, and what ``outputs_of`` needs beside what the model returns."""
        raise NotImplementedError

    def outputs_of(self, output: Any, output_args: Any, micro_batch: TensorDict) -> dict[str, torch.Tensor]:
        """Named outputs of every sequence, jagged."""
        raise NotImplementedError

    def rows_of(self, micro_batch: TensorDict) -> ForwardRows:
        """The micro-batch's layout, planned or made now, on its device."""
        assert self.sharing is not None
        layout = layout_of(micro_batch)
        if layout is None:
            layout = self.sharing.lay_out(self.sharing.read(micro_batch))
        carrying = None if self.carrier is None else self.carrier.carrying(layout)
        rows = self.sharing.to_device(layout, micro_batch, carrying)
        return rows

    def jagged_outputs(
        self, rows: ForwardRows, names: list[str], columns_NC: torch.Tensor, micro_batch: TensorDict
    ) -> dict[str, torch.Tensor]:
        """C named outputs of the head rows, as the jagged tensors that verl's losses read."""
        offsets, columns_AC = micro_batch["input_ids"].offsets(), self._of_all_ranks(rows, columns_NC)
        return {name: rows.to_jagged(columns_AC[:, i], offsets) for i, name in enumerate(names)}

    def _of_all_ranks(self, rows: ForwardRows, columns_NC: torch.Tensor) -> torch.Tensor:
        """Columns of the head rows of a Ulysses group; a rank whose head failed does not come to gather them."""
        if self.meetings is None or self.ulysses_sequence_parallel_size == 1:
            return rows.of_all_ranks(columns_NC)
        self.meetings.before_collectives()
        columns_AC = rows.of_all_ranks(columns_NC)
        self.meetings.after_collectives()
        return columns_AC
