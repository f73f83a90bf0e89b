"""Assign the sequences of a batch to ranks and mini-batches, for V1 and V0, and log the dedup ratio."""

import logging
import re
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.utils.transferqueue_utils import KVBatchMeta

from verl_pg_plugin.compat import requirements
from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.planning.balance import balance_groups, order_by_sessions
from verl_pg_plugin.planning.prefix_breaks import Turn, count_tokens, report

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # verl's default level is WARNING

ESTIMATED_TOKENS = "prefix_grouper/balance/estimated_tokens"
"""Metric: mean tokens of a mini-batch on all ranks, as the balance estimates them."""


def mini_batches_of_config(trainer: Any, batch_size: int) -> int:
    """Return the number of mini-batches in a batch; 1 if the batch is no multiple, as while only the critic trains."""
    roles = trainer.config.actor_rollout_ref
    mini_batch_size = roles.actor.ppo_mini_batch_size * roles.rollout.n
    return 1 if batch_size % mini_batch_size else batch_size // mini_batch_size


def regroup(trainer: Any, batch: Any, metrics: dict[str, Any], logging_prefix: str) -> None:
    """Reorder a batch of a run that shares prefixes: ranks and mini-batches get whole groups at balanced cost.

    The batch is V1's ``KVBatchMeta`` or V0's ``DataProto``; one of another type keeps verl's order, with one warning.
    Adds verl's metrics of tokens per rank, under ``logging_prefix``, and the plugin's metrics to ``metrics``.
    """
    if not mode_of(trainer.config).shares_prefixes:
        return
    is_v1 = isinstance(batch, KVBatchMeta)
    if not (is_v1 or isinstance(batch, DataProto)):  # as verl PR 7415 plans
        if not hasattr(trainer, "_pg_warned"):
            trainer._pg_warned = True
            logger.warning(
                "%s is neither a KVBatchMeta nor a DataProto, so its order stays: groups may be cut, which loses "
                "sharing, not exactness. Fix: pip install '%s'",
                f"{type(batch).__module__}.{type(batch).__qualname__}",
                requirements("tested").get("verl", "verl"),
            )
        return
    if not hasattr(trainer, "_pg_flops"):
        trainer._pg_flops = actor_flops(trainer.config)
        if why := trainer._pg_flops.unknown:
            logger.warning("FLOPs of the actor %s: groups are balanced by tokens", why)
    if is_v1:
        uids, *numbers = zip(*map(_split_key, batch.keys), strict=True)
        # Ranks, since a number in a key may exceed int64.
        sessions, places = (np.unique(np.array(column, dtype=object), return_inverse=True)[1] for column in numbers)
        prompts, responses = (np.array([tag[name] for tag in batch.tags]) for name in ("prompt_len", "response_len"))
    else:  # V0 has one sequence in each session
        uids = batch.non_tensor_batch["uid"].tolist()
        sessions, places = np.arange(len(uids)), np.zeros(len(uids), dtype=np.int64)
        mask, width = batch.batch["attention_mask"].long(), batch.batch["prompts"].shape[1]  # (B, P + R), P
        prompts, responses = mask[:, :width].sum(dim=1).numpy(), mask[:, width:].sum(dim=1).numpy()
    ranks = trainer.actor_rollout_wg._dispatch_info
    if "actor" not in ranks:  # verl's balance fills it, a trainer's own may not
        ranks["actor"] = trainer.actor_rollout_wg._query_dispatch_info("actor")
    group, num_ranks = np.unique(uids, return_inverse=True)[1], max(ranks["actor"]) + 1
    num_mini_batches = mini_batches_of_config(trainer, len(uids))
    order = order_by_sessions(group, sessions, places, prompts, responses)
    balance = balance_groups(order, group, responses, trainer._pg_flops.segments, num_ranks, num_mini_batches)
    partitions = [part.tolist() for part in np.split(balance.order, num_ranks)]
    metrics.update(log_seqlen_unbalance((prompts + responses).tolist(), partitions, prefix=logging_prefix))
    metrics["prefix_grouper/balance/slowest_over_mean"] = balance.slowest_over_mean
    metrics["prefix_grouper/balance/cut_groups"] = balance.num_cut_groups
    metrics[ESTIMATED_TOKENS] = balance.num_tokens / num_mini_batches
    metrics.update(rollout_metrics(trainer))
    if is_v1 and len({*zip(uids, sessions.tolist(), strict=True)}) < len(uids):
        metrics["prefix_grouper/lost_to_broken_prefixes"] = _lost_to_broken_prefixes(trainer, batch)
    batch.reorder(balance.order.tolist() if is_v1 else torch.from_numpy(balance.order))


def _split_key(key: str) -> tuple[str, int, int]:
    """Return uid, session and place of ``{uid}_{session}_{place}``; any other key is a separate group, as in verl."""
    match = re.fullmatch(r"(.*)_(\d+)_(\d+)", key, re.DOTALL)
    return (match[1], int(match[2]), int(match[3])) if match else (key, 0, 0)


def rollout_metrics(trainer: Any) -> dict[str, float]:
    """Return the counts of our router since the last batch; empty with another router."""
    managers = (getattr(trainer, f"{kind}_server_manager", None) for kind in ("standalone", "llm"))
    routers = (getattr(manager, "global_load_balancer", None) for manager in managers if manager is not None)
    router: Any = next(routers, None)
    return dict(ray.get(router.take_metrics.remote())) if hasattr(router, "take_metrics") else {}


def _lost_to_broken_prefixes(trainer: Any, batch: Any) -> float:
    """Return the fraction of computed tokens that breaks cost in V1's first sessions; log the worst break once."""
    import transfer_queue  # not installed in all runs on V0

    tags = {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")}
    keys = sorted(tags, key=_split_key)
    keys = keys[: np.searchsorted(np.cumsum([tags[key]["seq_len"] for key in keys]), 2**17) + 1]  # 0.3 s
    fields = transfer_queue.kv_batch_get(keys, batch.partition_id, select_fields=["prompts", "responses"])
    sessions: dict[str, list[Turn]] = {}
    for key, *parts in zip(keys, fields["prompts"].unbind(), fields["responses"].unbind(), strict=True):
        sessions.setdefault("{}_{}".format(*_split_key(key)), []).append(Turn(torch.cat(parts).numpy(), len(parts[0])))
    computed, lost = count_tokens(sessions.values())
    if lost and not hasattr(trainer, "_pg_described_breaks"):
        trainer._pg_described_breaks = True
        logger.warning("%s", report(sessions, trainer.tokenizer.decode, most=1))
    return lost / max(computed, 1)


def actor_flops(config: DictConfig) -> Any:
    """Return the FLOPs of the actor, from its config alone; no weights are read."""
    from verl_pg_plugin.planning.cost import ModelFlops
    from verl_pg_plugin.skeleton import text_skeleton  # not imported in stock runs

    def build() -> Any:
        section = OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True)
        model = omega_conf_to_dataclass(OmegaConf.create({**section, "load_tokenizer": False}))  # type: ignore[dict-item]
        return text_skeleton(model.hf_config, model.trust_remote_code)

    return ModelFlops.or_tokens(build)


def updated(trainer: Any, metrics: dict[str, Any]) -> None:
    """Log the dedup ratio of an update, and after the last step in all steps of this process.

    ``metrics`` of an update are numbers, or one for each rank or mini-batch. V1's contain the balance's metrics too, to
    which the ratio of estimated to computed tokens is added.
    """
    total, computed, padding = (f"actor/prefix_grouper/{kind}_tokens" for kind in ("total", "computed", "padding"))
    if computed not in metrics:
        return  # nothing was shared
    if not any(hasattr(trainer, name) for name in ("_pg_flops", "_pg_tokens", "_pg_warned")):
        logger.warning(
            "%s updates its actor with a batch that never went through _balance_batch: groups may be cut, which loses "
            "sharing, not exactness. Fix: set trainer.balance_batch=True, or call self._balance_batch(batch, metrics) "
            "before old log-probs; if that does not call verl's, use verl_pg_plugin.trainer.keep_groups",
            type(trainer).__qualname__,
        )
    if ESTIMATED_TOKENS in metrics:
        ratio = metrics[ESTIMATED_TOKENS] / float(metrics[computed] - metrics[padding])
        metrics["prefix_grouper/balance/estimated_over_computed_tokens"] = ratio
    tokens = np.array([np.mean(metrics[total]), np.mean(metrics[computed])])
    step, last = getattr(trainer, "global_steps", 0), getattr(trainer, "total_training_steps", None)
    logger.info("step %d/%s: %s", step, last or "?", _dedup_ratio(*tokens))
    trainer._pg_tokens = getattr(trainer, "_pg_tokens", 0) + tokens
    if last and step >= last:
        logger.info("shared prefixes, mean over the run: %s", _dedup_ratio(*trainer._pg_tokens))


def _dedup_ratio(total: float, computed: float) -> str:
    return f"dedup ratio {total / computed:.2f} (tokens of all sequences over computed tokens, updates of the actor)"
