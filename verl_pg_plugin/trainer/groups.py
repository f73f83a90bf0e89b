"""Which sequences of a batch meet on a rank and in a mini-batch, whatever container a trainer keeps them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_pg_plugin.layout import IntArray
from verl_pg_plugin.planning.balance import Balance, balance_groups
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.planning.sessions import order_by_sessions

__all__ = ["ESTIMATED_TOKENS", "NumMiniBatches", "Samples", "group_order", "mini_batches_of_config"]

NumMiniBatches = Callable[[Any, int], int]
"""Optimizer steps that a trainer divides a batch into, from the trainer and the number of sequences."""

ESTIMATED_TOKENS = "prefix_grouper/balance/estimated_rows"
"""Metric: tokens that all ranks compute in a mini-batch, as the balance expects; the mean, as of engine metrics."""

COMPARED_PROMPTS = 16
"""Of so many prompts of a batch the tokens are compared, to see what all begin with."""


@dataclass(frozen=True)
class Samples:
    """What a driver knows of the B sequences of a batch.

    Attributes:
        uids: (B,) sequences with one prompt have one uid.
        sessions, places: (B,) int64, which of a prompt's sessions a sequence is from, and which of its sequences it is.
        prompt_lengths, response_lengths: (B,) int64, tokens.
        common_tokens: that all prompts begin with.
    """

    uids: Sequence[str]
    sessions: IntArray
    places: IntArray
    prompt_lengths: IntArray
    response_lengths: IntArray
    common_tokens: int = 0

    def balance(self, flops: ModelFlops, num_ranks: int, num_mini_batches: int) -> Balance:
        """By what they cost; two runs with other uids get the same. Raises as ``balance_groups`` does."""
        group = np.unique(self.uids, return_inverse=True)[1]
        lengths = self.prompt_lengths, self.response_lengths
        order = order_by_sessions(group, self.sessions, self.places, *lengths, self.common_tokens)
        return balance_groups(order, group, self.response_lengths, flops.segments, num_ranks, num_mini_batches)


def group_order(
    trainer: Any,
    samples: Samples,
    metrics: dict[str, Any],
    logging_prefix: str,
    num_mini_batches: NumMiniBatches,
) -> IntArray:
    """(B,) order of a batch in which ranks and mini-batches hold whole groups and finish together.

    Args:
        trainer: of verl's; has ``model_flops``.
        samples: its batch.
        metrics: gets verl's figures about tokens per rank under ``logging_prefix``, and ours about cost.
        logging_prefix: of verl's figures.
        num_mini_batches: optimizer steps that the trainer divides the batch into.

    Raises:
        ValueError: the batch does not divide into ranks and mini-batches.
    """
    num_ranks = num_ranks_of(trainer.actor_rollout_wg)
    balance = samples.balance(trainer.model_flops, num_ranks, num_mini_batches(trainer, len(samples.uids)))
    lengths = (samples.prompt_lengths + samples.response_lengths).tolist()
    partitions = [part.tolist() for part in np.split(balance.order, num_ranks)]
    metrics.update(log_seqlen_unbalance(seqlen_list=lengths, partitions=partitions, prefix=logging_prefix))
    metrics["prefix_grouper/balance/slowest_over_mean"] = balance.slowest_over_mean
    metrics["prefix_grouper/balance/cut_groups"] = balance.num_cut_groups
    metrics[ESTIMATED_TOKENS] = balance.num_tokens / balance.cost.shape[1]
    return balance.order


def actor_flops(config: DictConfig) -> ModelFlops:
    """Price of the actor's tokens, from its config: no weight is read.

    verl's trainers load the same config in the same process, from a folder, the hub or hdfs and with the user's
    ``trust_remote_code``, to get at the tokenizer: there is no checkpoint that trains and has none here.

    Raises:
        ValueError: the model cannot be priced, see ``ModelFlops.of``.
    """
    section = OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True)
    model = omega_conf_to_dataclass(OmegaConf.create({**section, "load_tokenizer": False}))  # type: ignore[dict-item]
    return ModelFlops.of_config(model.hf_config, trust_remote_code=model.trust_remote_code)


def some_prompts(uids: Sequence[str]) -> list[int]:
    """A sequence of each of ``COMPARED_PROMPTS`` prompts, spread over the batch."""
    first = sorted({uid: place for place, uid in reversed(list(enumerate(uids)))}.values())
    wanted = min(COMPARED_PROMPTS, len(first))
    return [first[i * len(first) // wanted] for i in range(wanted)]


def mini_batches_of_config(trainer: Any, batch_size: int) -> int:
    """Optimizer steps that verl's trainers divide a batch into.

    While only the critic trains, the batch is a multiple of its mini-batches and not of the actor's: it counts as one.
    """
    roles = trainer.config.actor_rollout_ref
    mini_batch_size = roles.actor.ppo_mini_batch_size * roles.rollout.n
    return 1 if batch_size % mini_batch_size else batch_size // mini_batch_size


def num_ranks_of(workers: Any) -> int:
    """Data-parallel ranks of a worker group's actor; asks it where a trainer's own balance has not."""
    if "actor" not in workers._dispatch_info:
        workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
    return max(workers._dispatch_info["actor"]) + 1
