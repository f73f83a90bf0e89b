"""How an engine's mini-batches are cut: what its options, its model and its device say to the planner."""

from __future__ import annotations

import math
from typing import Any

import torch

from verl_pg_plugin.batching.copied_keys import CopiedKeys
from verl_pg_plugin.cost.row_memory import RowMemory
from verl_pg_plugin.engine.batch.cut_for_copies import cut_for_copies
from verl_pg_plugin.engine.batch.micro_batch_plan import CarryPolicy, MicroBatchPlan
from verl_pg_plugin.engine.shared_model import SharedModel
from verl_pg_plugin.engine.sharing_modes import SharingMode
from verl_pg_plugin.engine.steps.verify import Verifier
from verl_pg_plugin.layout import Layout


class PlanPolicy:
    """Answers for the engine that it is a base of, from that engine's configs, mode, model and verifier."""

    engine_config: Any
    model_config: Any
    sharing: SharingMode | None
    shared_model: SharedModel
    verifier: Verifier | None
    ulysses_sequence_parallel_size: int
    _autocast_dtype: torch.dtype

    @property
    def min_dedup_ratio(self) -> float:
        """Micro-batches that would share less than this run as plain rmpad; all of them after a mismatch."""
        fallen_back = self.verifier is not None and self.verifier.fallen_back
        return math.inf if fallen_back else 1.0

    def _cut_for_copies(self, plan: MicroBatchPlan, forward_only: bool) -> str | None:
        """What to say where copied keys have cut groups; None where they have not."""
        memory, carries = self._row_memory, self._carry_policy(forward_only) is not None
        a_copy = memory.copy + (0 if forward_only else memory.copy_gradients)
        copies = self._copied_keys(forward_only)
        return cut_for_copies(plan, copies, carries, a_copy // self.ulysses_sequence_parallel_size)

    def _carry_policy(self, forward_only: bool) -> CarryPolicy | None:
        """How groups above the limit go on in the next micro-batch; None where each part stands alone."""
        assert self.sharing is not None
        options = self.engine_config.prefix_grouper
        if options.carry == "never" or not (self.sharing.carries and self.shared_model.carries):
            return None
        return CarryPolicy(self._row_memory.weights(forward_only), forward_only)

    def _copied_keys(self, forward_only: bool) -> CopiedKeys:
        """What keys that attention copies take of the token budget."""
        return self._row_memory.copies(forward_only)

    @property
    def _row_memory(self) -> RowMemory:
        assert self.sharing is not None
        options = self.engine_config.prefix_grouper
        return RowMemory.of(
            self.model_config.hf_config.get_text_config(),
            self._autocast_dtype,
            checkpointing=self.model_config.enable_gradient_checkpointing,
            # Offloaded activations keep nothing here; what is carried then has the room of layer inputs.
            keeps_attention=(options.keeps_attention and not self.model_config.enable_activation_offload),
            kernel=self.sharing.kernel.name,
        )

    def _price(self, layout: Layout) -> float:
        return self.shared_model.flops.forward([layout])
