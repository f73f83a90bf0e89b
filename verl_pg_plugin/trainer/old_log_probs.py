"""Take old log-probs from the update of verl's trainers, V1 and V0, instead of a separate forward.

Where a batch is one optimizer step, the weights of both are equal. Until the update the batch holds NaN. The update
marks its batch, and the engine keeps the outputs. Then verl's own method runs: the engine returns these outputs without
a forward, and verl stores them and computes its metrics.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.debug.metrics import calculate_debug_metrics

from verl_pg_plugin.config.keys import FROM_UPDATE
from verl_pg_plugin.config.old_log_prob import CORRECTION, separate_forward_reasons

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # verl's default level is WARNING


def compute_or_postpone(compute: Callable[..., Any], trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run verl's ``_compute_old_log_prob``, or store NaN if the update will provide old log-probs."""
    if _extra_info(batch).get(FROM_UPDATE) or _needs_forward(trainer, batch):
        return compute(trainer, batch, *args, **kwargs)
    trainer._pg_postponed = True
    if _is_v1(batch):
        import transfer_queue as tq

        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        data = tq.kv_batch_get(**where, select_fields=["response_mask"])
        data["old_log_probs"] = data["response_mask"].float() * math.nan
        return tq.kv_batch_put(**where, fields=data.select("old_log_probs"))
    nan = torch.full(batch.batch["response_mask"].shape, math.nan)
    return DataProto.from_dict({"old_log_probs": nan, "entropys": nan.clone()}), 0.0  # MFU of the forward left out


def update_and_complete(update: Callable[..., Any], trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run verl's ``_update_actor``, then store postponed old log-probs and their metrics."""
    if not getattr(trainer, "_pg_postponed", False):
        return update(trainer, batch, *args, **kwargs)
    trainer._pg_postponed, info = False, _extra_info(batch)
    info[FROM_UPDATE] = True
    output = update(trainer, batch, *args, **kwargs)
    info["disable_auto_offload"] = True  # the next call reads no weights
    metrics = (args[0] if args else kwargs["metrics"]) if _is_v1(batch) else output.meta_info["metrics"]
    data = _complete_v1(trainer, batch, metrics) if _is_v1(batch) else _complete_v0(trainer, batch, metrics)
    correction = OmegaConf.select(trainer.config, CORRECTION)
    if correction is not None and "rollout_log_probs" in data.batch:
        metrics.update(compute_rollout_correction_and_add_to_batch(data, correction)[1])
    del info[FROM_UPDATE], info["disable_auto_offload"]
    return output


def _complete_v1(trainer: Any, batch: Any, metrics: dict[str, Any]) -> DataProto:
    import transfer_queue as tq

    trainer._compute_old_log_prob(batch, metrics)
    fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    return DataProto(batch=data.to_padded_tensor())


def _complete_v0(trainer: Any, batch: DataProto, metrics: dict[str, Any]) -> DataProto:
    """Do what V0's ``fit`` does after the forward."""
    outputs, _ = trainer._compute_old_log_prob(batch)
    batch.batch["old_log_probs"] = outputs.batch["old_log_probs"]
    actor, mask = trainer.config.actor_rollout_ref.actor, batch.batch["response_mask"]
    aggregation = {"loss_agg_mode": actor.loss_agg_mode, "loss_scale_factor": actor.loss_scale_factor}
    metrics["actor/entropy"] = agg_loss(outputs.batch["entropys"], mask, **aggregation).item()
    if "rollout_log_probs" in batch.batch:
        metrics.update(calculate_debug_metrics(batch))
    return batch


def _needs_forward(trainer: Any, batch: Any) -> bool:
    """Return True unless the update of this batch provides old log-probs; log each reason once."""
    if not hasattr(trainer, "_pg_reasons"):
        trainer._pg_reasons = separate_forward_reasons(trainer.config)  # logged before Ray
        trainer._pg_logged = set[str]()
    if trainer._pg_reasons:
        return True
    roles, trainer_cls, reason = trainer.config.actor_rollout_ref, type(trainer), ""
    expected = roles.actor.ppo_mini_batch_size * roles.rollout.n
    if not trainer_cls.__module__.startswith("verl.trainer.ppo."):
        reason = f"{trainer_cls.__module__}.{trainer_cls.__qualname__} is not verl's trainer and may read them"
    elif trainer.config.trainer.critic_warmup > trainer.global_steps:
        reason = f"trainer.critic_warmup={trainer.config.trainer.critic_warmup}: no update follows"
    elif len(batch) != expected:
        reason = f"{len(batch)} sequences are not one mini-batch of {expected}"
    if reason and reason not in trainer._pg_logged:
        trainer._pg_logged.add(reason)
        logger.info("step %d: old log-probs: a separate forward (%s)", trainer.global_steps, reason)
    return bool(reason)


def _is_v1(batch: Any) -> bool:
    return hasattr(batch, "tags")


def _extra_info(batch: Any) -> dict[str, Any]:
    """Return what a batch passes to the workers besides tensors."""
    info: dict[str, Any] = batch.extra_info if _is_v1(batch) else batch.meta_info
    return info
