"""Deal sequences to ranks and mini-batches: as many to each, little computed twice, and all ranks done together."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from verl_pg_plugin.batching.branches import swap_branches
from verl_pg_plugin.batching.least_loaded import LeastLoaded
from verl_pg_plugin.batching.runs import FloatArray, Run, RunPrices, SegmentPrice
from verl_pg_plugin.layout.order import IntArray, PrefixOrder

__all__ = ["Balance", "SegmentPrice", "balance_groups"]

CHEAPEST_TRIED = 8
"""Cells that the costliest may exchange runs with."""
LEVEL = 1.01
"""No group is cut where the slowest is no more than this above the mean."""


@dataclass(frozen=True)
class Balance:
    """A new order of B sequences whose equal consecutive chunks are the ranks.

    Attributes:
        order: (B,) index of the sequence at each place; within a rank, equal consecutive chunks are mini-batches.
        cost: (num_ranks, num_mini_batches) deduplicated cost, in units of the price.
        num_cut_groups: groups that are in more than one mini-batch of one rank.
        num_rows: rows that all ranks compute, if the prefix order is right about what is shared.
    """

    order: IntArray
    cost: FloatArray
    num_cut_groups: int
    num_rows: int

    @property
    def time(self) -> float:
        """Ranks wait for the slowest at the end of every mini-batch."""
        return float(self.cost.max(axis=0).sum())

    @property
    def slowest_over_mean(self) -> float:
        """Time over that of a perfect balance of the same work."""
        return self.time / float(self.cost.mean(axis=0).sum())


@dataclass
class _Cell:
    """One mini-batch of one rank while it fills up."""

    room: int
    cost: float
    runs: list[Run]

    @cached_property
    def by_size(self) -> dict[int, tuple[FloatArray, list[Run]]]:
        """Runs of each number of sequences by ascending cost."""
        of_size: dict[int, list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: run.cost):
            of_size.setdefault(run.size, []).append(run)
        return {size: (np.array([run.cost for run in runs]), runs) for size, runs in of_size.items()}

    def add(self, run: Run) -> None:
        self.room -= run.size
        self.cost += run.cost
        self.runs.append(run)

    def replace(self, leaves: Run, enters: Run) -> None:
        self.runs = [enters if run is leaves else run for run in self.runs]
        self.cost += enters.cost - leaves.cost
        del self.by_size


def balance_groups(
    order: PrefixOrder,
    group: IntArray,
    response_lengths: IntArray,
    price: SegmentPrice,
    num_ranks: int,
    num_mini_batches: int = 1,
    may_cut: bool = True,
) -> Balance:
    """Longest-processing-time-first over groups, with the same number of sequences in every mini-batch.

    A group costs the rows of its trie. It is cut where it fits nowhere whole, and where that lets the slowest rank
    finish earlier although what both parts share is computed twice: at the forks that cost least. Groups of one size,
    and then branches, change places while that makes the costliest mini-batch cheaper.

    Args:
        order: what the B sequences share; the sequences of a group are neighbours in it.
        group: (B,) equal values mark sequences that belong together, in the caller's order.
        response_lengths: (B,) tokens, in the caller's order.
        price: of segments.
        num_ranks: chunks of the batch; B is a multiple of ``num_ranks * num_mini_batches``.
        num_mini_batches: optimizer steps that a rank's chunk is divided into.
        may_cut: also groups that fit somewhere whole.

    Raises:
        ValueError: B is not such a multiple.
    """
    num_cells = num_ranks * num_mini_batches
    if len(group) % num_cells:
        raise ValueError(
            f"{len(group)} sequences do not divide into {num_ranks} ranks x {num_mini_batches} mini-batches"
        )
    prices = RunPrices(order, response_lengths, price)
    sorted_group = group[order.sequences]
    bounds = [*np.flatnonzero(np.append(True, sorted_group[1:] != sorted_group[:-1])).tolist(), len(group)]
    groups = [prices.run(first, stop) for first, stop in pairwise(bounds)]
    cells = _deal(groups, num_cells, len(group) // num_cells, prices)
    _swap_runs(cells)
    balance = _balance(cells, sorted_group, prices, num_ranks)
    if not may_cut or balance.slowest_over_mean <= LEVEL:
        return balance
    for cell, runs in zip(cells, swap_branches([cell.runs for cell in cells], sorted_group, prices), strict=True):
        cell.runs = runs
    cut = _balance(cells, sorted_group, prices, num_ranks)
    return min(balance, cut, key=lambda tried: tried.time)


def _deal(runs: Sequence[Run], num_cells: int, size: int, prices: RunPrices) -> list[_Cell]:
    """Dearest run first, to the cheapest cell with room; what fits nowhere whole last, in parts, to the roomiest."""
    cells = [_Cell(room=size, cost=0.0, runs=[]) for _ in range(num_cells)]
    cheapest = LeastLoaded()
    for i, cell in enumerate(cells):
        cheapest.put(i, cell.room, cell.cost)

    def put(chosen: int, run: Run) -> None:
        cell = cells[chosen]
        cell.add(run)
        if cell.room:
            cheapest.put(chosen, cell.room, cell.cost)

    leftover = []
    for run in sorted(runs, key=lambda run: -run.cost):
        chosen = cheapest.take(run.size)
        if chosen is None:
            leftover.append(run)
        else:
            put(chosen, run)
    for run in leftover:
        while run.size:
            chosen = cheapest.take_roomiest()
            room = cells[chosen].room
            cut = run.stop if run.size <= room else prices.cheapest_cut(run, room)
            put(chosen, prices.run(run.first, cut))
            if cut == run.stop:
                break
            run = prices.run(cut, run.stop)
    return cells


def _balance(cells: list[_Cell], sorted_group: IntArray, prices: RunPrices, num_ranks: int) -> Balance:
    """The cells of each rank by mini-batch: cells of like cost make one, and no rank has the costliest of each.

    Ranks wait for each other at the end of a mini-batch in updates, and at the end of the batch in passes without
    gradient. Mini-batches come in the order of their first sequences, so that none is put off for being long.
    """
    in_cell = np.empty(len(sorted_group), dtype=np.int64)
    costs, sequences = [], []
    for number, cell in enumerate(cells):
        for run in cell.runs:
            in_cell[run.first : run.stop] = number
        costs.append(prices.together(cell.runs))
        rows = np.concatenate([prices.order.sequences[run.first : run.stop] for run in cell.runs])
        sequences.append(np.sort(rows))
    by_cost = sorted(range(len(cells)), key=lambda number: -costs[number])
    mini_batches = [by_cost[start : start + num_ranks] for start in range(0, len(cells), num_ranks)]
    mini_batches.sort(key=lambda mini_batch: min(sequences[number][0] for number in mini_batch))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for mini_batch in mini_batches:
        ranks.sort(key=lambda rank: sum(costs[number] for number in rank))
        for rank, number in zip(ranks, mini_batch, strict=True):  # costliest first
            rank.append(number)
    cells_of_groups = np.unique(np.stack([sorted_group, in_cell]), axis=1)[0]
    again = sum(int(prices.order.num_shared[run.first]) for cell in cells for run in cell.runs)
    once = sum(int(prices.counted_twice(cell.runs).sum()) for cell in cells)
    return Balance(
        order=np.concatenate([sequences[number] for rank in ranks for number in rank]),
        cost=np.array([[costs[number] for number in rank] for rank in ranks]),
        num_cut_groups=int((np.unique(cells_of_groups, return_counts=True)[1] > 1).sum()),
        num_rows=int(prices.order.num_new.sum()) + again - once,
    )


def _swap_runs(cells: list[_Cell]) -> None:
    """Exchange runs of one size between the costliest cell and a cheap one, the best exchange first."""
    for _ in range(2 * len(cells)):
        costliest = max(cells, key=lambda cell: cell.cost)
        best: tuple[float, _Cell, Run, Run] | None = None
        for other in heapq.nsmallest(CHEAPEST_TRIED, cells, key=lambda cell: cell.cost):
            gap = costliest.cost - other.cost
            for mine, theirs in _most_level(costliest, other):
                left = max(costliest.cost - mine.cost + theirs.cost, other.cost + mine.cost - theirs.cost)
                if 0 < mine.cost - theirs.cost < gap and (best is None or left < best[0]):
                    best = left, other, mine, theirs
        if best is None:
            return
        _, other, mine, theirs = best
        for cell, leaves, enters in ((costliest, mine, theirs), (other, theirs, mine)):
            cell.replace(leaves, enters)


def _most_level(costliest: _Cell, other: _Cell) -> list[tuple[Run, Run]]:
    """For each size, the two runs whose exchange moves most nearly half of what one cell costs above the other."""
    half = (costliest.cost - other.cost) / 2
    exchanges = []
    for size, (costs, runs) in costliest.by_size.items():
        if size not in other.by_size:
            continue
        their_costs, their_runs = other.by_size[size]
        after = np.searchsorted(their_costs, costs - half)  # the nearest is this one or the one before it
        near = np.stack([np.maximum(after - 1, 0), np.minimum(after, len(their_costs) - 1)])
        k, m = np.unravel_index(np.abs(costs - their_costs[near] - half).argmin(), near.shape)
        exchanges.append((runs[m], their_runs[near[k, m]]))
    return exchanges
