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
from verl.utils.transferqueue_utils import KVBatchMeta, tq

from verl_pg_plugin.config.keys import FROM_UPDATE
from verl_pg_plugin.config.old_log_prob import CORRECTION, separate_forward_reasons

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # verl's default level is WARNING


def compute_or_postpone(compute: Callable[..., Any], trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run verl's ``_compute_old_log_prob``, or store NaN if the update will provide old log-probs."""
    if _needs_forward(trainer, batch) or _extra_info(batch).get(FROM_UPDATE):
        return compute(trainer, batch, *args, **kwargs)
    trainer._pg_postponed = True
    if isinstance(batch, DataProto):  # V0
        nan = torch.full(batch.batch["response_mask"].shape, math.nan)
        return DataProto.from_dict({"old_log_probs": nan, "entropys": nan.clone()}), 0.0  # MFU: no forward has run
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
    data["old_log_probs"] = data["response_mask"].float() * math.nan
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data.select("old_log_probs"))


def update_and_complete(update: Callable[..., Any], trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run verl's ``_update_actor``, then store postponed old log-probs and their metrics."""
    if not getattr(trainer, "_pg_postponed", False):
        return update(trainer, batch, *args, **kwargs)
    trainer._pg_postponed, info = False, _extra_info(batch)
    info[FROM_UPDATE] = True
    output = update(trainer, batch, *args, **kwargs)
    info["disable_auto_offload"] = True  # the engine reads no weights
    if not isinstance(batch, DataProto):
        metrics = args[0] if args else kwargs["metrics"]
        trainer._compute_old_log_prob(batch, metrics)
        fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        data = DataProto(batch=data.to_padded_tensor())
    else:  # as V0's ``fit`` does after its forward
        data, metrics, config = batch, output.meta_info["metrics"], trainer.config.actor_rollout_ref.actor
        outputs = trainer._compute_old_log_prob(batch)[0].batch
        batch.batch["old_log_probs"], mask = outputs["old_log_probs"], batch.batch["response_mask"]
        aggregation = {name: config[name] for name in ("loss_agg_mode", "loss_scale_factor")}
        metrics["actor/entropy"] = agg_loss(outputs["entropys"], mask, **aggregation).item()
        if "rollout_log_probs" in batch.batch:
            metrics.update(calculate_debug_metrics(batch))
    correction = OmegaConf.select(trainer.config, CORRECTION)
    if correction is not None and "rollout_log_probs" in data.batch:
        metrics.update(compute_rollout_correction_and_add_to_batch(data, correction)[1])
    del info[FROM_UPDATE], info["disable_auto_offload"]
    return output


def _needs_forward(trainer: Any, batch: Any) -> bool:
    """Return True unless the update of this batch provides old log-probs; log each reason once."""
    if not hasattr(trainer, "_pg_logged"):
        trainer._pg_logged = separate_forward_reasons(trainer.config)  # logged before Ray
        trainer._pg_postpones = not trainer._pg_logged
    if not trainer._pg_postpones:
        return True
    config, trainer_cls = trainer.config, type(trainer)
    expected = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    reason = ""
    if not isinstance(batch, KVBatchMeta | DataProto):
        reason = f"{type(batch).__qualname__} is neither a KVBatchMeta nor a DataProto"
    elif not trainer_cls.__module__.startswith("verl.trainer.ppo."):
        reason = f"{trainer_cls.__module__}.{trainer_cls.__qualname__} is not verl's trainer and may read them"
    elif config.trainer.critic_warmup > trainer.global_steps:
        reason = f"trainer.critic_warmup={config.trainer.critic_warmup}: no update follows"
    elif len(batch) != expected:
        reason = f"the batch is not one mini-batch of {expected} sequences"
    if reason and reason not in trainer._pg_logged:
        trainer._pg_logged.append(reason)
        logger.info("step %d: separate forward for old log-probs: %s", trainer.global_steps, reason)
    return bool(reason)


def _extra_info(batch: Any) -> Any:
    """Return the mapping that a batch passes to the workers besides tensors."""
    return batch.meta_info if isinstance(batch, DataProto) else batch.extra_info
