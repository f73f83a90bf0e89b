"""Whole groups for trainers derived from verl's V1 ``PPOTrainer``."""

from __future__ import annotations

from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl_pg_plugin.config.keys import TRAINER_PREFIX
from verl_pg_plugin.planning.sessions import common_prefix
from verl_pg_plugin.trainer.gain import log_gain
from verl_pg_plugin.trainer.groups import ESTIMATED_TOKENS, KeepsGroups, Samples, group_order, some_prompts

__all__ = ["KeepsGroupsV1"]


class KeepsGroupsV1(KeepsGroups):
    """A batch is a ``KVBatchMeta``: keys ``{uid}_{session}_{index}`` and tags; the tokens lie in TransferQueue."""

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        # verl compares the mode with "sync" to choose the replay buffer and how checkpoints are taken.
        config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(TRAINER_PREFIX)
        super().__init__(config, *args, **kwargs)

    def _balance_batch(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        """verl pads the batch to a multiple it can dispatch and tears groups apart; put them together again."""
        batch = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)  # type: ignore[misc]
        if self.model_flops is None:
            return batch
        keys = [key.rsplit("_", 2) for key in batch.keys]
        uids = [uid for uid, _, _ in keys]
        samples = Samples(
            uids=uids,
            sessions=np.array([int(session) for _, session, _ in keys]),
            places=np.array([int(place) for _, _, place in keys]),
            prompt_lengths=np.array([tag["prompt_len"] for tag in batch.tags]),
            response_lengths=np.array([tag["response_len"] for tag in batch.tags]),
            common_tokens=self._common_tokens(batch, uids),
        )
        order = group_order(self, samples, metrics, logging_prefix, type(self).num_mini_batches)
        batch.reorder(order.tolist())
        self._is_balanced = True
        return batch

    def _common_tokens(self, batch: Any, uids: list[str]) -> int:
        """What all prompts begin with, from the tokens of a few that are not verl's filler."""
        import transfer_queue  # which V0 runs without

        compared = [i for i in some_prompts(uids) if not batch.tags[i].get("is_padding")]
        if len(compared) < 2:
            return 0
        prompts = transfer_queue.kv_batch_get(
            keys=[batch.keys[i] for i in compared], partition_id=batch.partition_id, select_fields=["prompts"]
        )["prompts"]
        return common_prefix([prompt.numpy() for prompt in prompts.unbind()])

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Hold the tokens that the balance expected against those that the engine has computed, and log the gain."""
        batch = super()._update_actor(batch, metrics)
        engine = "actor/prefix_grouper/"
        if ESTIMATED_TOKENS in metrics and f"{engine}physical_tokens" in metrics:
            computed = float(metrics[f"{engine}physical_tokens"] - metrics[f"{engine}padding_tokens"])
            metrics["prefix_grouper/balance/estimated_over_real_rows"] = metrics[ESTIMATED_TOKENS] / computed
        log_gain(self, metrics)
        return batch
