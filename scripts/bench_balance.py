"""How well the balance across ranks knows and levels what they compute, on batches of agents and of long tails.

    python scripts/bench_balance.py [--output FILE.csv]

Each case is priced in the ways that a driver could: ``sessions`` reads lengths and
sessions from the tags (what the trainers do), ``tokens`` compares all tokens
(what the ranks will compute); ``whole`` are the sessions with no group cut that fits a rank. ``rows`` is estimated over
real rows, ``slowest`` the slowest rank over the mean with real prices, ``time`` the slowest over the mean of the work
that is there when nothing is cut, ``seconds`` the CPU time that the driver spends.
Of twelve batches of agents the one with the slowest rank is shown.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from verl_pg_plugin.batching.balance import Balance, balance_groups
from verl_pg_plugin.batching.runs import RunPrices
from verl_pg_plugin.batching.session_order import order_by_sessions
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.layout.prefix_order import IntArray, PrefixOrder, build_prefix_order
from verl_pg_plugin.mixers.protocol import PairCost

FLOPS = ModelFlops(per_row=7.2e9, per_head_row=7.8e8, pairs=(PairCost(5.9e5),))
"""Forward of Qwen3-4B's shape."""
COLUMNS = ("case", "priced by", "rows", "slowest", "time", "cut groups", "seconds")


@dataclass(frozen=True)
class Rows:
    """A batch as a driver knows it, with the tokens that it does not know."""

    name: str
    group: IntArray
    session: IntArray
    place: IntArray
    prompts: IntArray
    responses: IntArray
    tokens: tuple[IntArray, ...] = ()
    num_ranks: int = 4

    def padded(self) -> Rows:
        """verl's filler rows, so that ranks get as many."""
        missing = -len(self.group) % self.num_ranks
        more = np.arange(missing)
        filler = np.zeros(128, dtype=np.int64)
        return Rows(
            self.name,
            np.append(self.group, np.full(missing, self.group.max() + 1)),
            np.append(self.session, more),
            np.append(self.place, np.zeros(missing, dtype=np.int64)),
            np.append(self.prompts, np.full(missing, 127)),
            np.append(self.responses, np.ones(missing, dtype=np.int64)),
            (*self.tokens, *[filler] * missing) if self.tokens else (),
            self.num_ranks,
        )


def agent_batch(prompts_per_rank: int = 8, sessions: int = 8, num_ranks: int = 4, seed: int = 0) -> Rows:
    """One row per turn, 1 to 12 turns a session; in a third of the sessions the context is edited once on the way.

    Half of the edits put a summary between the task and the last tokens, half drop one tool output and keep the rest.
    """
    rng = np.random.default_rng(seed)
    columns: list[tuple[int, int, int, int, int]] = []
    tokens = []
    for group in range(prompts_per_rank * num_ranks):
        prompt = rng.integers(150_000, size=rng.integers(500, 3500))
        for session in range(sessions):
            context, turns, outputs = prompt, int(rng.integers(1, 13)), []
            edited = int(rng.integers(1, turns)) if turns > 1 and rng.random() < 1 / 3 else -1
            for turn in range(turns):
                if turn == edited and rng.random() < 0.5:
                    summary = rng.integers(150_000, size=rng.integers(50, 300))
                    context = np.concatenate([prompt, summary, context[-int(rng.integers(50, 400)) :]])
                elif turn == edited:
                    start, stop = outputs[int(rng.integers(len(outputs)))]
                    context = np.concatenate([context[:start], context[stop:]])
                reply = rng.integers(150_000, size=rng.integers(50, 400))
                columns.append((group, session, turn, len(context), len(reply)))
                tokens.append(np.concatenate([context, reply]))
                context = np.concatenate([tokens[-1], rng.integers(150_000, size=rng.integers(100, 1500))])
                outputs.append((len(tokens[-1]), len(context)))
    return Rows("agents, a third edited", *np.array(columns).T, tokens=tuple(tokens), num_ranks=num_ranks).padded()


def long_tail(num_rows: int = 65_536, n: int = 64, num_ranks: int = 1024, sigma: float = 0.9, seed: int = 0) -> Rows:
    """GRPO groups whose responses have log-normal lengths; with 64 rows a rank every rank is a group."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(num_rows // n), n)
    prompts = rng.integers(200, 2000, num_rows // n)[group]
    responses = np.minimum(rng.lognormal(7.3, sigma, num_rows), 32_768).astype(np.int64) + 1
    session = np.tile(np.arange(n), num_rows // n)
    return Rows(f"log-normal, n {n}", group, session, np.zeros_like(group), prompts, responses, num_ranks=num_ranks)


def by_sessions(rows: Rows) -> PrefixOrder:
    return order_by_sessions(rows.group, rows.session, rows.place, rows.prompts, rows.responses)


def by_tokens(rows: Rows) -> PrefixOrder:
    """Group after group, in each by tokens."""
    offsets = np.append(0, np.cumsum([len(tokens) for tokens in rows.tokens]))
    return build_prefix_order(np.concatenate(rows.tokens), offsets, classes=rows.group)


def measure(rows: Rows, name: str, make_order: Callable[[Rows], PrefixOrder], may_cut: bool = True) -> tuple[Any, ...]:
    """A line of the table."""

    start = time.process_time()
    order = make_order(rows)
    balance = balance_groups(order, rows.group, rows.responses, FLOPS.segments, rows.num_ranks, may_cut=may_cut)
    seconds = time.process_time() - start
    real = by_tokens(rows) if rows.tokens else by_sessions(rows)
    costs, num_rows = real_costs(real, rows, balance)
    prices = RunPrices(real, rows.responses, FLOPS.segments)
    return (
        rows.name,
        name,
        round(balance.num_rows / num_rows, 3),
        round(float(costs.max() / costs.mean()), 3),
        round(float(costs.max() / (prices.new.sum() / rows.num_ranks)), 3),
        balance.num_cut_groups,
        round(seconds, 2),
    )


def real_costs(order: PrefixOrder, rows: Rows, balance: Balance) -> tuple[np.ndarray, int]:
    """FLOPs of each rank and rows of all, from what the sequences really share."""
    prices = RunPrices(order, rows.responses, FLOPS.segments)
    place_of = np.argsort(order.sequences)
    costs, num_rows = [], 0
    for sequences in np.split(balance.order, rows.num_ranks):
        places = np.sort(place_of[sequences]).tolist()
        costs.append(prices.together([prices.run(place, place + 1) for place in places]))
        num_rows += int(order.num_rows[places].sum())
        num_rows -= sum(int(order.num_shared[a + 1 : b + 1].min()) for a, b in pairwise(places))
    return np.array(costs), num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    agents = [agent_batch(seed=seed) for seed in range(12)]
    table = [
        *(
            max((measure(rows, name, make_order) for rows in agents), key=lambda line: line[3])
            for name, make_order in (("sessions", by_sessions), ("tokens", by_tokens))
        ),
        *[
            measure(rows, name, by_sessions, may_cut)
            for rows in (long_tail(), long_tail(n=16))
            for name, may_cut in (("whole", False), ("sessions", True))
        ],
    ]
    with open(args.output, "w", newline="") if args.output else sys.stdout as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *table])


if __name__ == "__main__":
    main()
