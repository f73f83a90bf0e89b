"""verl's VeOmni engine with shared prefixes; imported only where verl's own can be, which needs the package veomni.

VeOmni builds a model by files of its own, which look attention up as those of transformers do, and shards it with
FSDP2. Its engine inherits from verl's FSDP engine and has other methods in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from veomni.distributed.parallel_state import get_parallel_state
from verl.workers.engine.veomni import VeOmniEngineWithLMHead

from verl_pg_plugin.engine.engine import SharedPrefixLanguageModel
from verl_pg_plugin.engine.prepare import prepare_config


class SharedPrefixVeOmniLanguageModel(SharedPrefixLanguageModel, VeOmniEngineWithLMHead):
    """Language-model engine in packed mode; how it shards, loads and saves is VeOmni's."""

    _autocast_dtype = torch.bfloat16  # which verl runs VeOmni's models in, whatever their weights are
    scaler = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device_mesh, size = get_parallel_state().fsdp_mesh, get_parallel_state().ulysses_size
        if size != self.ulysses_sequence_parallel_size:  # tokens would be cut for other ranks than share them
            raise ValueError(
                f"ulysses_parallel_size={self.ulysses_sequence_parallel_size}: VeOmni keeps that of a process's first "
                f"engine, {size}; set actor_rollout_ref.actor.veomni and actor_rollout_ref.ref.veomni alike"
            )

    def _maybe_apply_async_activation_offload(self, module: nn.Module) -> None:
        """What verl's engine calls between building a model and sharding it."""
        prepare_config(module.config, self.modality)
        self._take_over(module)
        self._finish_unsharded(module)

    def _build_model_optimizer(self) -> None:
        super()._build_model_optimizer()
        self._replace_checkpoints(self.module)  # VeOmni checkpoints layers when it shards them
