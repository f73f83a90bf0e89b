"""How well the balance across ranks knows and levels what they compute, on batches of agents and of long tails.

    python scripts/bench_balance.py [--output FILE.csv]

Each case is priced in the ways that a driver could: ``prompt once`` charges a group's first prompt once and every
response, ``sessions`` reads lengths and sessions from the tags (what the trainers do), ``tokens`` compares all tokens
(what the ranks will compute); ``whole`` are the sessions with no group cut that fits a rank. ``rows`` is estimated over
real rows, ``slowest`` the slowest rank over the mean with real prices, ``time`` the slowest over the mean of the work
that is there when nothing is cut, ``seconds`` (CPU) and ``MiB`` what the driver spends.
Of twelve batches of agents the one with the slowest rank is shown.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.layout.order import IntArray, PrefixOrder, build_prefix_order
from verl_pg_plugin.mixers.protocol import PairCost
from verl_pg_plugin.planning.balance import Balance, balance_groups, cost_together
from verl_pg_plugin.planning.sessions import order_by_sessions

FLOPS = ModelFlops(per_row=7.2e9, per_head_row=7.8e8, pairs=(PairCost(5.9e5),))
"""Forward of Qwen3-4B's shape."""
COLUMNS = ("case", "priced by", "rows", "slowest", "time", "cut groups", "seconds", "MiB")


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


def large_agents(num_rows: int = 65_536, turns: int = 8, n: int = 8, num_ranks: int = 1024) -> Rows:
    """Rows of 10,000 tokens on average."""
    group = np.repeat(np.arange(num_rows // (turns * n)), turns * n)
    session = np.tile(np.repeat(np.arange(n), turns), num_rows // (turns * n))
    place = np.tile(np.arange(turns), num_rows // turns)
    rng = np.random.default_rng(0)
    steps = rng.integers(500, 3600, num_rows).reshape(-1, turns)
    steps[:, 0] = 2000
    prompts = np.cumsum(steps, axis=1).ravel()
    return Rows("agents of 10k tokens", group, session, place, prompts, rng.integers(100, 400, num_rows), (), num_ranks)


def by_sessions(rows: Rows) -> PrefixOrder:
    return order_by_sessions(rows.group, rows.session, rows.place, rows.prompts, rows.responses)


def by_tokens(rows: Rows) -> PrefixOrder:
    """Group after group, in each by tokens."""
    offsets = np.append(0, np.cumsum([len(tokens) for tokens in rows.tokens]))
    return build_prefix_order(np.concatenate(rows.tokens), offsets, classes=rows.group)


def prompt_once(rows: Rows) -> PrefixOrder:
    """As if every row were its group's first prompt and a response."""
    prompts = rows.prompts[np.unique(rows.group, return_index=True)[1]][np.unique(rows.group, return_inverse=True)[1]]
    return order_by_sessions(rows.group, np.arange(len(rows.group)), rows.place, prompts, rows.responses)


def measure(rows: Rows, name: str, make_order: Callable[[Rows], PrefixOrder], may_cut: bool = True) -> tuple[Any, ...]:
    """A line of the table."""

    def deal() -> Balance:
        order = make_order(rows)
        return balance_groups(order, rows.group, rows.responses, FLOPS.segments, rows.num_ranks, may_cut=may_cut)

    start = time.process_time()
    balance = deal()
    seconds = time.process_time() - start
    tracemalloc.start()  # slows it down
    deal()
    mebibytes = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    real = by_tokens(rows) if rows.tokens else by_sessions(rows)
    costs, num_tokens = real_costs(real, rows, balance)
    least, _ = cost_together(real, rows.responses, FLOPS.segments, np.arange(len(rows.group)))
    return (
        rows.name,
        name,
        round(balance.num_tokens / num_tokens, 3),
        round(float(costs.max() / costs.mean()), 3),
        round(float(costs.max() / (least / rows.num_ranks)), 3),
        balance.num_cut_groups,
        round(seconds, 2),
        round(mebibytes, 1),
    )


def real_costs(order: PrefixOrder, rows: Rows, balance: Balance) -> tuple[np.ndarray, int]:
    """FLOPs of each rank and tokens that all compute, from what the sequences really share."""
    places = np.argsort(order.sequences)[np.split(balance.order, rows.num_ranks)]
    priced = [cost_together(order, rows.responses, FLOPS.segments, np.sort(of_rank)) for of_rank in places]
    return np.array([cost for cost, _ in priced]), sum(tokens for _, tokens in priced)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    agents = [agent_batch(seed=seed) for seed in range(12)]
    table = [
        *(
            max((measure(rows, name, make_order) for rows in agents), key=lambda line: line[3])
            for name, make_order in (("prompt once", prompt_once), ("sessions", by_sessions), ("tokens", by_tokens))
        ),
        *[
            measure(rows, name, by_sessions, may_cut)
            for rows in (long_tail(), long_tail(n=16), large_agents())
            for name, may_cut in (("whole", False), ("sessions", True))
        ],
    ]
    with open(args.output, "w", newline="") if args.output else sys.stdout as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *table])


if __name__ == "__main__":
    main()
