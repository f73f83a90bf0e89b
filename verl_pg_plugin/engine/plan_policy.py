"""How an engine's mini-batches are cut: what its options, its model and its device say to the planner."""

from __future__ import annotations

import math
from typing import Any

import torch

from verl_pg_plugin.engine.batch.micro_batch_plan import CarryPolicy
from verl_pg_plugin.engine.shared_model import SharedModel
from verl_pg_plugin.engine.sharing_modes import SharingMode
from verl_pg_plugin.engine.steps.verify import Verifier
from verl_pg_plugin.layout import Layout
from verl_pg_plugin.planning.memory import TokenMemory


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
        return math.inf if fallen_back else self.engine_config.prefix_grouper.min_dedup_ratio

    def _carry_policy(self, forward_only: bool) -> CarryPolicy | None:
        """How groups above the limit go on in the next micro-batch; None where each part stands alone."""
        assert self.sharing is not None
        options = self.engine_config.prefix_grouper
        if options.carry == "never" or not (self.sharing.carries and self.shared_model.carries):
            return None
        return CarryPolicy(self._row_memory.weights(forward_only), forward_only)

    @property
    def _row_memory(self) -> TokenMemory:
        assert self.sharing is not None
        options = self.engine_config.prefix_grouper
        return TokenMemory.of(
            self.model_config.hf_config.get_text_config(),
            self._autocast_dtype.itemsize,
            checkpointing=self.model_config.enable_gradient_checkpointing,
            # Offloaded activations keep nothing here; what is carried then has the room of layer inputs.
            keeps_attention=not (options.recompute_attention or self.model_config.enable_activation_offload),
        )

    def _price(self, layout: Layout) -> float:
        return self.shared_model.flops.forward([layout])
