"""Which sequences of a batch meet on a rank and in a mini-batch, in the containers of V1 and V0; what that saved."""

import logging
import re
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.planning.balance import balance_groups, order_by_sessions

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # verl's own level hides what is no warning

ESTIMATED_TOKENS = "prefix_grouper/balance/estimated_tokens"
"""Metric: tokens that all ranks compute in a mini-batch, as the balance expects; the mean, as of engine metrics."""


def mini_batches_of_config(trainer: Any, batch_size: int) -> int:
    """Optimizer steps that verl's trainers divide a batch into.

    While only the critic trains, the batch is a multiple of its mini-batches and not of the actor's: it counts as one.
    """
    roles = trainer.config.actor_rollout_ref
    mini_batch_size = roles.actor.ppo_mini_batch_size * roles.rollout.n
    return 1 if batch_size % mini_batch_size else batch_size // mini_batch_size


def regroup(trainer: Any, batch: Any, metrics: dict[str, Any], logging_prefix: str) -> None:
    """Reorder a batch of a run that shares prefixes: ranks and mini-batches hold whole groups and finish together.

    The batch is V1's ``KVBatchMeta`` or V0's ``DataProto``. ``metrics`` gets verl's figures about tokens per rank under
    ``logging_prefix``, and ours about cost.
    """
    if not mode_of(trainer.config).shares_prefixes:
        return
    if not hasattr(trainer, "_pg_flops"):
        trainer._pg_flops = actor_flops(trainer.config)
        if why := trainer._pg_flops.unknown:
            logger.warning("FLOPs of the actor %s: groups are balanced by tokens", why)
    if is_v1 := hasattr(batch, "tags"):
        uids, *numbers = zip(*map(_split_key, batch.keys), strict=True)
        sessions, places = map(np.array, numbers)
        prompts, responses = (np.array([tag[name] for tag in batch.tags]) for name in ("prompt_len", "response_len"))
    else:  # which has one sequence a session
        uids = batch.non_tensor_batch["uid"].tolist()
        sessions, places = np.arange(len(uids)), np.zeros(len(uids), dtype=np.int64)
        mask, width = batch.batch["attention_mask"].long(), batch.batch["prompts"].shape[1]  # of (B, P + R) and (B, P)
        prompts, responses = mask[:, :width].sum(dim=1).numpy(), mask[:, width:].sum(dim=1).numpy()
    ranks = trainer.actor_rollout_wg._dispatch_info
    if "actor" not in ranks:  # where a trainer's own balance has not asked
        ranks["actor"] = trainer.actor_rollout_wg._query_dispatch_info("actor")
    group, num_ranks = np.unique(uids, return_inverse=True)[1], max(ranks["actor"]) + 1
    num_mini_batches = mini_batches_of_config(trainer, len(uids))
    order = order_by_sessions(group, sessions, places, prompts, responses)
    price = trainer._pg_flops.segments
    balance = balance_groups(order, group, responses, price, num_ranks, num_mini_batches)
    lengths = (prompts + responses).tolist()
    partitions = [part.tolist() for part in np.split(balance.order, num_ranks)]
    metrics.update(log_seqlen_unbalance(seqlen_list=lengths, partitions=partitions, prefix=logging_prefix))
    metrics["prefix_grouper/balance/slowest_over_mean"] = balance.slowest_over_mean
    metrics["prefix_grouper/balance/cut_groups"] = balance.num_cut_groups
    metrics[ESTIMATED_TOKENS] = balance.num_tokens / num_mini_batches
    metrics.update(rollout_metrics(trainer))
    batch.reorder(balance.order.tolist() if is_v1 else torch.from_numpy(balance.order))


def _split_key(key: str) -> tuple[str, int, int]:
    """Return uid, session and place of ``{uid}_{session}_{place}``; any other key is a group of its own, as in verl."""
    found = re.fullmatch(r"(.*)_(\d+)_(\d+)", key, re.DOTALL)
    return (found[1], int(found[2]), int(found[3])) if found else (key, 0, 0)


def rollout_metrics(trainer: Any) -> dict[str, float]:
    """Return what our router has counted since the last batch; empty with another router."""
    managers = (getattr(trainer, f"{kind}_server_manager", None) for kind in ("standalone", "llm"))
    routers = (getattr(manager, "global_load_balancer", None) for manager in managers if manager is not None)
    router: Any = next(routers, None)
    return dict(ray.get(router.take_metrics.remote())) if hasattr(router, "take_metrics") else {}


def actor_flops(config: DictConfig) -> Any:
    """Price of the actor's tokens, from the config that verl's trainers load for the tokenizer: no weight is read."""
    from verl_pg_plugin.planning.cost import ModelFlops
    from verl_pg_plugin.skeleton import text_skeleton  # stock runs do without both

    def build() -> Any:
        section = OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True)
        model = omega_conf_to_dataclass(OmegaConf.create({**section, "load_tokenizer": False}))  # type: ignore[dict-item]
        return text_skeleton(model.hf_config, model.trust_remote_code)

    return ModelFlops.or_tokens(build)


def updated(trainer: Any, metrics: dict[str, Any]) -> None:
    """Log what sharing saved in an update, and at the last step in all steps of this process.

    The numbers are tokens of a mini-batch. ``metrics`` are those of an update, numbers or one for each rank or
    mini-batch. V1's hold those of the balance too, and get the tokens that it expected over those that were computed.
    """
    names = [f"actor/prefix_grouper/{kind}_tokens" for kind in ("total", "computed")]
    if names[1] not in metrics:
        return  # nothing was shared
    if not hasattr(trainer, "_pg_flops") and not hasattr(trainer, "_pg_tokens"):
        logger.warning(
            "%s updates its actor with a batch that never went through _balance_batch: groups stay as dispatch cuts"
            " them, which may cost sharing and no exactness. Set trainer.balance_batch=True, or call "
            "self._balance_batch(batch, metrics) before old log-probs are computed; where that does not call "
            "verl's, wrap the class with verl_pg_plugin.trainer.keep_groups",
            type(trainer).__qualname__,
        )
    total, computed = (metrics[name] for name in names)
    if ESTIMATED_TOKENS in metrics:
        over = metrics[ESTIMATED_TOKENS] / float(computed - metrics["actor/prefix_grouper/padding_tokens"])
        metrics["prefix_grouper/balance/estimated_over_computed_tokens"] = over
    counted = np.array([np.mean(total), np.mean(computed)])
    step, last = getattr(trainer, "global_steps", 0), getattr(trainer, "total_training_steps", None)
    logger.info("step %d/%s: %s", step, last or "?", _in_words(*counted))
    trainer._pg_tokens = getattr(trainer, "_pg_tokens", 0) + counted
    if last and step >= last:
        logger.info("shared prefixes, mean over the run: %s", _in_words(*trainer._pg_tokens))


def _in_words(total: float, computed: float) -> str:
    return f"{1 - computed / total:.1%} of tokens not computed, dedup ratio {total / computed:.2f}"
