"""Deal sequences to ranks and mini-batches so that groups stay whole and every rank has as much to compute."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from verl_pg_plugin.batching.least_loaded import LeastLoaded
from verl_pg_plugin.layout.prefix_order import IntArray

FloatArray: TypeAlias = NDArray[np.float64]
SegmentPrice: TypeAlias = Callable[[IntArray, IntArray, IntArray], FloatArray]
"""Cost of each of S segments from (S,) rows they share, (S,) rows they have and (S,) rows of those with the head, as
``cost.flops.ModelFlops.segments`` gives it."""


@dataclass(frozen=True)
class Balance:
    """A new order of B sequences whose equal consecutive chunks are the ranks.

    Attributes:
        order: (B,) index of the sequence at each place; within a rank, equal consecutive chunks are mini-batches.
        cost: (num_ranks, num_mini_batches) deduplicated cost, in units of the price.
        num_cut_groups: groups that did not fit into one mini-batch of one rank.
    """

    order: IntArray
    cost: FloatArray
    num_cut_groups: int

    @property
    def slowest_over_mean(self) -> float:
        """Time over that of a perfect balance; ranks wait for the slowest at the end of every mini-batch."""
        return float(self.cost.max(axis=0).sum() / self.cost.mean(axis=0).sum())


@dataclass(frozen=True)
class _Unit:
    """A group, or the part of one that was cut, in one mini-batch of one rank."""

    rows: IntArray
    cost: float
    whole: bool


@dataclass
class _Cell:
    """One mini-batch of one rank while it fills up."""

    room: int
    cost: float
    units: list[_Unit]

    @cached_property
    def whole_by_size(self) -> dict[int, tuple[FloatArray, list[_Unit]]]:
        """Groups that were not cut, those of one size by ascending cost."""
        of_size: dict[int, list[_Unit]] = {}
        for unit in sorted(self.units, key=lambda unit: unit.cost):
            if unit.whole:
                of_size.setdefault(len(unit.rows), []).append(unit)
        return {size: (np.array([unit.cost for unit in units]), units) for size, units in of_size.items()}

    @property
    def rows(self) -> IntArray:
        return np.sort(np.concatenate([unit.rows for unit in self.units]))

    def replace(self, leaves: _Unit, enters: _Unit) -> None:
        self.units = [enters if unit is leaves else unit for unit in self.units]
        self.cost += enters.cost - leaves.cost
        del self.whole_by_size


def balance_groups(
    group: IntArray,
    prompt_lengths: IntArray,
    response_lengths: IntArray,
    price: SegmentPrice,
    num_ranks: int,
    num_mini_batches: int = 1,
) -> Balance:
    """Longest-processing-time-first over whole groups, with the same number of sequences in every mini-batch.

    A group costs its prompt once and each response with the attention to that prompt; see ``layout.PackedLayout`` for
    the rows. Groups that fit nowhere whole are dealt last, to the mini-batches with most room, and pay their prompt in
    each. Then groups of one size change places while that makes the costliest mini-batch cheaper.

    Args:
        group: (B,) equal values mark sequences with one prompt.
        prompt_lengths, response_lengths: (B,) tokens.
        price: of prompts and responses.
        num_ranks: chunks of the batch; B is a multiple of ``num_ranks * num_mini_batches``.
        num_mini_batches: optimizer steps that a rank's chunk is divided into.

    Raises:
        ValueError: B is not such a multiple.
    """
    num_cells = num_ranks * num_mini_batches
    if len(group) % num_cells:
        raise ValueError(
            f"{len(group)} sequences do not divide into {num_ranks} ranks x {num_mini_batches} mini-batches"
        )
    none = np.zeros_like(prompt_lengths)
    prompt_cost = price(none, prompt_lengths - 1, none)
    response_cost = price(prompt_lengths - 1, response_lengths, response_lengths)
    members, costs = _groups(group, prompt_cost, response_cost)

    cells = [_Cell(room=len(group) // num_cells, cost=0.0, units=[]) for _ in range(num_cells)]
    cheapest = LeastLoaded()
    for i, cell in enumerate(cells):
        cheapest.put(i, cell.room, cell.cost)

    def put(chosen: int, unit: _Unit) -> None:
        cell = cells[chosen]
        cell.room -= len(unit.rows)
        cell.cost += unit.cost
        cell.units.append(unit)
        if cell.room:
            cheapest.put(chosen, cell.room, cell.cost)

    leftover = []
    for g in np.argsort(-costs, kind="stable").tolist():
        chosen = cheapest.take(len(members[g]))
        if chosen is None:
            leftover.append(g)
        else:
            put(chosen, _Unit(members[g], float(costs[g]), whole=True))
    for g in leftover:
        rows = members[g]
        while len(rows):
            chosen = cheapest.take_roomiest()
            part, rows = rows[: cells[chosen].room], rows[cells[chosen].room :]
            put(chosen, _Unit(part, float(prompt_cost[part[0]] + response_cost[part].sum()), whole=False))

    _swap_groups(cells)
    ranks = _ranks(cells, num_ranks)
    return Balance(
        order=np.concatenate([cell.rows for rank in ranks for cell in rank]),
        cost=np.array([[cell.cost for cell in rank] for rank in ranks]),
        num_cut_groups=len(leftover),
    )


def _ranks(cells: list[_Cell], num_ranks: int) -> list[list[_Cell]]:
    """The cells of each rank by mini-batch: cells of like cost make one, and no rank has the costliest of each.

    Ranks wait for each other at the end of a mini-batch in updates, and at the end of the batch in passes without
    gradient. Mini-batches come in the order of their first sequences, so that none is put off for being long.
    """
    by_cost = sorted(cells, key=lambda cell: -cell.cost)
    mini_batches = [by_cost[start : start + num_ranks] for start in range(0, len(cells), num_ranks)]
    mini_batches.sort(key=lambda mini_batch: min(cell.rows[0] for cell in mini_batch))
    ranks: list[list[_Cell]] = [[] for _ in range(num_ranks)]
    for mini_batch in mini_batches:
        ranks.sort(key=lambda rank: sum(cell.cost for cell in rank))
        for rank, cell in zip(ranks, mini_batch, strict=True):  # costliest first
            rank.append(cell)
    return ranks


def _swap_groups(cells: list[_Cell], candidates: int = 8) -> None:
    """Exchange whole groups of one size between the costliest cell and a cheap one, the best exchange first."""
    for _ in range(2 * len(cells)):
        costliest = max(cells, key=lambda cell: cell.cost)
        best: tuple[float, _Cell, _Unit, _Unit] | None = None
        for other in heapq.nsmallest(candidates, cells, key=lambda cell: cell.cost):
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


def _most_level(costliest: _Cell, other: _Cell) -> list[tuple[_Unit, _Unit]]:
    """For each size, the two groups whose exchange moves most nearly half of what one cell costs above the other."""
    half = (costliest.cost - other.cost) / 2
    exchanges = []
    for size, (costs, units) in costliest.whole_by_size.items():
        if size not in other.whole_by_size:
            continue
        their_costs, their_units = other.whole_by_size[size]
        after = np.searchsorted(their_costs, costs - half)  # the nearest is this one or the one before it
        near = np.stack([np.maximum(after - 1, 0), np.minimum(after, len(their_costs) - 1)])
        k, m = np.unravel_index(np.abs(costs - their_costs[near] - half).argmin(), near.shape)
        exchanges.append((units[m], their_units[near[k, m]]))
    return exchanges


def _groups(group: IntArray, prompt_cost: FloatArray, response_cost: FloatArray) -> tuple[list[IntArray], FloatArray]:
    """Sequence indices of each of G groups, and (G,) what it costs whole."""
    order = np.argsort(group, kind="stable")
    starts = np.append(0, np.flatnonzero(np.diff(group[order])) + 1)
    costs = prompt_cost[order[starts]] + np.add.reduceat(response_cost[order], starts)
    return np.split(order, starts[1:]), costs
