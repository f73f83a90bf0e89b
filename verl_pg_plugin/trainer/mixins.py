"""What goes in front of a trainer class of verl's, of V1's line or of V0's, so that its ranks get whole groups."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from omegaconf import DictConfig

from verl_pg_plugin import upstream
from verl_pg_plugin.config.keys import TRAINER_PREFIX
from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.planning.sessions import common_prefix
from verl_pg_plugin.trainer.gain import log_gain
from verl_pg_plugin.trainer.groups import (
    ESTIMATED_TOKENS,
    NumMiniBatches,
    Samples,
    actor_flops,
    group_order,
    mini_batches_of_config,
    some_prompts,
)

__all__ = ["KeepsGroups", "KeepsGroupsV0", "KeepsGroupsV1", "regroup"]

logger = logging.getLogger(__name__)


class KeepsGroups:
    """Goes in front of a trainer class, of either of verl's two lines.

    Attributes:
        model_flops: of the actor, by which groups are balanced; None in a run that shares no prefixes.
    """

    config: DictConfig
    actor_rollout_wg: Any
    model_flops: ModelFlops | None
    num_mini_batches: ClassVar[NumMiniBatches]
    regroup: ClassVar[Callable[..., None]]
    _is_balanced = False
    _has_warned = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Before any worker starts, so that what cannot be priced fails at once.
        self.model_flops = actor_flops(self.config) if mode_of(self.config).shares_prefixes else None

    def _balance_batch(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        """verl may pad the batch to a multiple it can dispatch and tears groups apart; put them together again."""
        replaced = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)  # type: ignore[misc]
        if self.model_flops is not None:
            batch = batch if replaced is None else replaced
            type(self).regroup(self, batch, metrics, logging_prefix, type(self).num_mini_batches)
            self._is_balanced = True
        return replaced

    def _update_actor(self, *args: Any, **kwargs: Any) -> Any:
        if self.model_flops is not None and not self._is_balanced and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s updates its actor with a batch that never went through _balance_batch: groups stay as dispatch cuts"
                " them, which costs sharing and no exactness. Set trainer.balance_batch=True, or call "
                "self._balance_batch(batch, metrics) before old log-probs are computed",
                type(self).__qualname__,
            )
        self._is_balanced = False
        return super()._update_actor(*args, **kwargs)  # type: ignore[misc]


def regroup_v1(
    trainer: Any, batch: Any, metrics: dict[str, Any], logging_prefix: str, num_mini_batches: NumMiniBatches
) -> None:
    """``regroup`` of a ``KVBatchMeta``: keys ``{uid}_{session}_{index}`` and tags; the tokens lie in TransferQueue."""
    keys = [key.rsplit("_", 2) for key in batch.keys]
    uids = [uid for uid, _, _ in keys]
    samples = Samples(
        uids=uids,
        sessions=np.array([int(session) for _, session, _ in keys]),
        places=np.array([int(place) for _, _, place in keys]),
        prompt_lengths=np.array([tag["prompt_len"] for tag in batch.tags]),
        response_lengths=np.array([tag["response_len"] for tag in batch.tags]),
        common_tokens=_common_tokens_v1(batch, uids),
    )
    batch.reorder(group_order(trainer, samples, metrics, logging_prefix, num_mini_batches).tolist())


def _common_tokens_v1(batch: Any, uids: list[str]) -> int:
    """What all prompts begin with, from the tokens of a few that are not verl's filler."""
    import transfer_queue  # which V0 runs without

    compared = [i for i in some_prompts(uids) if not batch.tags[i].get("is_padding")]
    if len(compared) < 2:
        return 0
    keys = [batch.keys[i] for i in compared]
    fields = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["prompts"])
    return common_prefix([prompt.numpy() for prompt in fields["prompts"].unbind()])


class KeepsGroupsV1(KeepsGroups):
    """Derived from verl's V1 ``PPOTrainer``."""

    regroup = staticmethod(regroup_v1)

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        # verl compares the mode with "sync" to choose the replay buffer and how checkpoints are taken.
        config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(TRAINER_PREFIX)
        super().__init__(config, *args, **kwargs)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Hold the tokens that the balance expected against those that the engine has computed, and log the gain."""
        batch = super()._update_actor(batch, metrics)
        engine = "actor/prefix_grouper/"
        if ESTIMATED_TOKENS in metrics and f"{engine}physical_tokens" in metrics:
            computed = float(metrics[f"{engine}physical_tokens"] - metrics[f"{engine}padding_tokens"])
            metrics["prefix_grouper/balance/estimated_over_real_rows"] = metrics[ESTIMATED_TOKENS] / computed
        log_gain(self, metrics)
        return batch


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
    batch.reorder(torch.from_numpy(group_order(trainer, samples, metrics, logging_prefix, num_mini_batches)))


class KeepsGroupsV0(KeepsGroups):
    """Derived from verl's V0 ``RayPPOTrainer``."""

    regroup = staticmethod(regroup)

    def _balance_batch(self, *args: Any, **kwargs: Any) -> Any:
        with upstream.verls_groups_off(self):
            return super()._balance_batch(*args, **kwargs)
