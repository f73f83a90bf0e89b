"""Whole groups for trainers derived from verl's V0 ``RayPPOTrainer``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl_pg_plugin import upstream
from verl_pg_plugin.planning.sessions import common_prefix
from verl_pg_plugin.trainer.groups import (
    KeepsGroups,
    NumMiniBatches,
    Samples,
    actor_flops,
    group_order,
    mini_batches_of_config,
    some_prompts,
)

__all__ = ["KeepsGroupsV0", "regroup"]


class KeepsGroupsV0(KeepsGroups):
    """A batch is a ``DataProto`` of padded tensors, which the balance reorders in place."""

    use_prefix_grouper: bool

    def _balance_batch(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        with upstream.verls_groups_off(self):
            replaced = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)  # type: ignore[misc]
        if self.model_flops is not None:
            batch = batch if replaced is None else replaced
            regroup(self, batch, metrics, logging_prefix, type(self).num_mini_batches)
            self._is_balanced = True
        return replaced


def regroup(
    trainer: Any,
    batch: Any,
    metrics: dict[str, Any],
    logging_prefix: str = "global_seqlen",
    num_mini_batches: NumMiniBatches = mini_batches_of_config,
) -> None:
    """Reorder a V0 trainer's batch so that ranks and mini-batches hold whole groups and finish together.

    Args:
        trainer: derived from verl's ``RayPPOTrainer``; remembers as ``model_flops`` what its actor's tokens cost.
        batch: ``DataProto`` of B sequences with ``prompts`` (B, P), ``attention_mask`` (B, P + R) and ``uid`` (B,).
        metrics, logging_prefix, num_mini_batches: see ``group_order``, which raises, too, as this does.
    """
    if getattr(trainer, "model_flops", None) is None:
        trainer.model_flops = actor_flops(trainer.config)
    prompts = batch.batch["prompts"]
    mask, width = batch.batch["attention_mask"].long(), prompts.shape[1]
    uids = batch.non_tensor_batch["uid"].tolist()
    samples = Samples(
        uids=uids,
        sessions=np.arange(len(uids)),  # V0 has one sequence a session
        places=np.zeros(len(uids), dtype=np.int64),
        prompt_lengths=mask[:, :width].sum(dim=1).numpy(),
        response_lengths=mask[:, width:].sum(dim=1).numpy(),
        common_tokens=common_prefix([prompts[i, mask[i, :width] > 0].numpy() for i in some_prompts(uids)]),
    )
    order = group_order(trainer, samples, metrics, logging_prefix, num_mini_batches)
    batch.reorder(torch.from_numpy(order))
