"""How long ranks wait for each other inside a mini-batch, by the order in which each runs its micro-batches.

    python scripts/bench_lockstep.py [--output FILE.csv]

Under FSDP ranks gather weights together in every layer, so the k-th micro-batches of all ranks take as long as the
dearest of them. What is shown is the sum of those over what the slowest rank computes: 1 where nobody waits inside.
The first order is most rows first, chains in front; "by cost" the dearest first, a chain by the mean of its parts;
"aligned" what the engine does (``verl_pg_plugin/planning/order.py``); "free" is by cost for parts that could be
moved one by one, which those of a chain cannot. Costs are FLOPs of an update with gradient checkpointing, exports
included, of Qwen3-4B's shape.
"""

from __future__ import annotations

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl is imported: its platform is chosen once

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_balance import agent_batch, by_sessions
from benchmarks.actor_cases import parse_case, rows_of_ranks
from benchmarks.shapes import SHAPES, config_of
from verl_pg_plugin.batching.chains import cut_with_chains
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits
from verl_pg_plugin.cost.row_memory import RowMemory

from verl_pg_plugin.batching.chains import cut_with_chains
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.cost.forecast import Batch, lay_out_chain
from verl_pg_plugin.layout import build_prefix_order
from verl_pg_plugin.planning.balance import balance_groups
from verl_pg_plugin.planning.order import align

MODEL = "qwen3-4b"
NUM_RANKS = 4
COLUMNS = ("batch", "budget", "micro-batches", "most rows first", "by cost", "aligned", "free")


Chains = list[np.ndarray]
"""(n, 3) of each chain of n parts: rows, FLOPs of the update, FLOPs of the export in front of it."""


def chains_of(batch: Batch, budget: int, at_least: int) -> Chains:
    """What a rank runs."""
    config = config_of(MODEL)
    flops, memory = ModelFlops.of_config(config), RowMemory.of(config, torch.bfloat16, True, True)
    order = build_prefix_order(batch.tokens, batch.offsets)
    plan = cut_with_chains(order, MicroBatchLimits(budget), memory.weights(forward_only=False), at_least)
    chains = []
    for parts in plan.chains:
        layouts = lay_out_chain(batch, parts, forward_only=False)
        update = [4 * flops.trunk(layout) + 3 * flops.per_head_row * len(layout.head_index) for layout in layouts]
        rows = [layout.num_tokens for layout in layouts]
        export = [flops.trunk(layout.prefill) if layout.prefill else 0.0 for layout in layouts]
        chains.append(np.array([rows, update, export]).T[::-1])
    return chains


def most_rows_first(chains: Chains) -> list[int]:
    return sorted(range(len(chains)), key=lambda i: (len(chains[i]) == 1, -chains[i][-1, 0]))


def by_cost(chains: Chains) -> list[int]:
    return sorted(range(len(chains)), key=lambda i: -chains[i][:, 1].mean())


def waiting(ranks: list[Chains], orders: list[list[int]]) -> float:
    """Time of all over the work of the slowest."""
    lines = np.stack([np.concatenate([chains[i] for i in order]) for chains, order in zip(ranks, orders, strict=True)])
    return round(float(lines[..., 1:].max(axis=0).sum() / lines[..., 1:].sum(axis=(1, 2)).max()), 3)


def measure(name: str, ranks: list[Batch], budget: int) -> tuple[Any, ...]:
    """A line of the table; ranks agree on a number of micro-batches as the engine does."""
    number = max(sum(map(len, chains_of(batch, budget, 1))) for batch in ranks)
    chains = [chains_of(batch, budget, number) for batch in ranks]
    apart = [[part[None] for chain in rank for part in chain] for rank in chains]
    return (
        name,
        budget,
        number,
        waiting(chains, [most_rows_first(rank) for rank in chains]),
        waiting(chains, [by_cost(rank) for rank in chains]),
        waiting(chains, align([[chain[:, 1:] for chain in rank] for rank in chains])),
        waiting(apart, [by_cost(rank) for rank in apart]),
    )


def agents(seed: int) -> list[Batch]:
    """``bench_balance.py``'s batch of agents, dealt to ranks."""
    rows = agent_batch(seed=seed, num_ranks=NUM_RANKS)
    flops = ModelFlops.of_config(config_of(MODEL))
    balance = balance_groups(by_sessions(rows), rows.group, rows.responses, flops.segments, NUM_RANKS)
    return [_batch([rows.tokens[i] for i in part], rows.prompts[part]) for part in np.split(balance.order, NUM_RANKS)]


def case(text: str) -> list[Batch]:
    """A case of ``bench_actor.py``."""
    rows = parse_case(text).rows(SHAPES[MODEL]["vocab_size"], NUM_RANKS)
    parts = rows_of_ranks(rows, False, ModelFlops.of_config(config_of(MODEL)), NUM_RANKS)
    ranks = [[rows.samples[row] for row in part] for part in parts]
    return [
        _batch([np.array([*s.prompt, *s.response]) for s in rank], np.array([len(s.prompt) for s in rank]))
        for rank in ranks
    ]


def _batch(tokens: list[np.ndarray], prompt_lengths: np.ndarray) -> Batch:
    return Batch(np.concatenate(tokens), np.append(0, np.cumsum(list(map(len, tokens)))), prompt_lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    long_tail = "4096,ln:1024,4-16,8"
    table = [measure(f"agents, seed {seed}", agents(seed), budget) for budget in (20480, 40960) for seed in range(3)]
    table += [measure(long_tail, case(long_tail), budget) for budget in (20480, 40960)]
    with open(args.output, "w", newline="") if args.output else sys.stdout as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *table])


if __name__ == "__main__":
    main()
