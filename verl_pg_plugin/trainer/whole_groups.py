"""Which sequences of a batch meet on a rank and in a mini-batch, whatever container a trainer keeps them in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_pg_plugin.batching.balance import Balance, balance_groups
from verl_pg_plugin.batching.session_order import BatchRows
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.layout.order import IntArray
from verl_pg_plugin.reporting.rollout_lengths import write_lengths

__all__ = [
    "ESTIMATED_ROWS",
    "actor_flops",
    "balance_metrics",
    "deal_groups",
    "mini_batches_of_config",
    "num_ranks_of",
    "some_prompts",
    "write_rollout_lengths",
]

ESTIMATED_ROWS = "prefix_grouper/balance/estimated_rows"
"""Metric: rows that all ranks compute in a mini-batch, as the balance expects; the mean, as of the engine's metrics."""

COMPARED_PROMPTS = 16
"""Of so many prompts of a batch the tokens are compared, to see what all begin with."""


def actor_flops(config: DictConfig) -> ModelFlops:
    """Price of the actor's rows, from its config: no weight is read.

    verl's trainers load the same config in the same process, from a folder, the hub or hdfs and with the user's
    ``trust_remote_code``, to get at the tokenizer: there is no checkpoint that trains and has none here.

    Raises:
        ValueError: the model cannot be priced, see ``ModelFlops.of``.
    """
    section = OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True)
    model = omega_conf_to_dataclass(OmegaConf.create({**section, "load_tokenizer": False}))  # type: ignore[dict-item]
    return ModelFlops.of_config(model.hf_config, trust_remote_code=model.trust_remote_code)


def some_prompts(uids: Sequence[str]) -> list[int]:
    """A row of each of ``COMPARED_PROMPTS`` prompts, spread over the batch."""
    first = sorted({uid: row for row, uid in reversed(list(enumerate(uids)))}.values())
    wanted = min(COMPARED_PROMPTS, len(first))
    return [first[i * len(first) // wanted] for i in range(wanted)]


def mini_batches_of_config(trainer: Any, batch_size: int) -> int:
    """Optimizer steps that verl's trainers divide a batch into.

    While only the critic trains, the batch is a multiple of its mini-batches and not of the actor's: it counts as one.
    """
    roles = trainer.config.actor_rollout_ref
    mini_batch_size = roles.actor.ppo_mini_batch_size * roles.rollout.n
    return 1 if batch_size % mini_batch_size else batch_size // mini_batch_size


def deal_groups(rows: BatchRows, flops: ModelFlops, num_ranks: int, num_mini_batches: int) -> Balance:
    """An order whose equal consecutive chunks are the ranks; two runs with other uids get the same.

    Raises:
        ValueError: the batch is no multiple of ``num_ranks * num_mini_batches``.
    """
    return balance_groups(rows.order(), rows.groups, rows.response_lengths, flops.segments, num_ranks, num_mini_batches)


def balance_metrics(balance: Balance, lengths: IntArray, num_ranks: int, prefix: str) -> dict[str, float]:
    """verl's figures about tokens per rank, under ``prefix``, and ours about cost."""
    partitions = [part.tolist() for part in np.split(balance.order, num_ranks)]
    return {
        **log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=partitions, prefix=prefix),
        "prefix_grouper/balance/slowest_over_mean": balance.slowest_over_mean,
        "prefix_grouper/balance/cut_groups": balance.num_cut_groups,
        ESTIMATED_ROWS: balance.num_rows / balance.cost.shape[1],
    }


def write_rollout_lengths(trainer: Any, rows: BatchRows) -> None:
    """Beside verl's dump of a step's rollouts, where ``trainer.rollout_data_dir`` asks for one.

    Args:
        trainer: any of verl's.
        rows: of the step, in the order of the ranks.
    """
    folder = OmegaConf.select(trainer.config, "trainer.rollout_data_dir")
    if folder:
        write_lengths(Path(folder), trainer.global_steps, rows)


def num_ranks_of(workers: Any) -> int:
    """Data-parallel ranks of a worker group's actor; asks it where a trainer's own balance has not."""
    if "actor" not in workers._dispatch_info:
        workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
    return max(workers._dispatch_info["actor"]) + 1
