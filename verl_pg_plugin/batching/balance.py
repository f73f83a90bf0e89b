"""Deal sequences to ranks and mini-batches so that groups stay whole and every rank has as much to compute."""

import heapq
from dataclasses import dataclass
from itertools import product

import numpy as np

from verl_pg_plugin.layout.prefix_order import IntArray

TOKENS_PER_SQUARED_LENGTH = 24576
"""Cost of a token in units of squared sequence length, for a 7B model: verl's ``calculate_workload``."""


@dataclass(frozen=True)
class Balance:
    """A new order of B sequences whose equal consecutive chunks are the ranks.

    Attributes:
        order: (B,) index of the sequence at each place; within a rank, equal consecutive chunks are mini-batches.
        cost: (num_ranks, num_mini_batches) deduplicated cost.
        num_cut_groups: groups that did not fit into one mini-batch of one rank.
    """

    order: IntArray
    cost: IntArray
    num_cut_groups: int

    @property
    def slowest_over_mean(self) -> float:
        """Time over that of a perfect balance; ranks wait for the slowest at the end of every mini-batch."""
        return float(self.cost.max(axis=0).sum() / self.cost.mean(axis=0).sum())


@dataclass(frozen=True)
class _Unit:
    """A group, or the part of one that was cut, in one mini-batch of one rank."""

    rows: IntArray
    cost: int
    whole: bool


@dataclass
class _Cell:
    """One mini-batch of one rank while it fills up."""

    room: int
    cost: int
    units: list[_Unit]


def balance_groups(
    group: IntArray, prompt_lengths: IntArray, response_lengths: IntArray, num_ranks: int, num_mini_batches: int = 1
) -> Balance:
    """Longest-processing-time-first over whole groups, with the same number of sequences in every mini-batch.

    A group costs its prompt once and each response with the attention to that prompt. Groups that fit nowhere
    whole are dealt last, to the mini-batches with most room, and pay their prompt in each. Then groups of one size
    change places while that makes the costliest mini-batch cheaper.

    Args:
        group: (B,) equal values mark sequences with one prompt.
        prompt_lengths, response_lengths: (B,) tokens.
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
    prompt_cost = TOKENS_PER_SQUARED_LENGTH * prompt_lengths + prompt_lengths**2
    response_cost = response_lengths * (TOKENS_PER_SQUARED_LENGTH + 2 * prompt_lengths + response_lengths)
    members = _members(group)
    costs = [int(prompt_cost[rows[0]] + response_cost[rows].sum()) for rows in members]

    cells = [_Cell(room=len(group) // num_cells, cost=0, units=[]) for _ in range(num_cells)]
    # Cells by the room they have left, each a heap by cost: the cheapest cell that fits is the best of few tops.
    by_room: dict[int, list[tuple[int, int]]] = {cells[0].room: [(0, i) for i in range(num_cells)]}

    def put(chosen: int, unit: _Unit) -> None:
        cell = cells[chosen]
        cell.room -= len(unit.rows)
        cell.cost += unit.cost
        cell.units.append(unit)
        if cell.room:
            heapq.heappush(by_room.setdefault(cell.room, []), (cell.cost, chosen))

    leftover = []
    for g in sorted(range(len(members)), key=lambda g: -costs[g]):
        tops = [(heap[0], room) for room, heap in by_room.items() if room >= len(members[g]) and heap]
        if not tops:
            leftover.append(g)
            continue
        _, room = min(tops)
        put(heapq.heappop(by_room[room])[1], _Unit(members[g], costs[g], whole=True))
    for g in leftover:
        rows = members[g]
        while len(rows):
            room = max(room for room, heap in by_room.items() if heap)
            part, rows = rows[:room], rows[room:]
            cost = int(prompt_cost[part[0]] + response_cost[part].sum())
            put(heapq.heappop(by_room[room])[1], _Unit(part, cost, whole=False))

    _swap_groups(cells)
    return Balance(
        order=np.concatenate([np.sort(np.concatenate([unit.rows for unit in cell.units])) for cell in cells]),
        cost=np.array([cell.cost for cell in cells]).reshape(num_ranks, num_mini_batches),
        num_cut_groups=len(leftover),
    )


def _swap_groups(cells: list[_Cell], candidates: int = 8) -> None:
    """Exchange whole groups of one size between the costliest cell and a cheap one, the best exchange first."""
    for _ in range(2 * len(cells)):
        costliest = max(cells, key=lambda cell: cell.cost)
        best: tuple[int, _Cell, _Unit, _Unit] | None = None
        for other in heapq.nsmallest(candidates, cells, key=lambda cell: cell.cost):
            for mine, theirs in product(costliest.units, other.units):
                saved = mine.cost - theirs.cost
                alike = mine.whole and theirs.whole and len(mine.rows) == len(theirs.rows)
                if alike and 0 < saved < costliest.cost - other.cost:
                    worse = max(costliest.cost - saved, other.cost + saved)
                    if best is None or worse < best[0]:
                        best = worse, other, mine, theirs
        if best is None:
            return
        _, other, mine, theirs = best
        for cell, leaves, enters in ((costliest, mine, theirs), (other, theirs, mine)):
            cell.units = [enters if unit is leaves else unit for unit in cell.units]
            cell.cost += enters.cost - leaves.cost


def _members(group: IntArray) -> list[IntArray]:
    """Sequence indices of each group."""
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    return np.split(order, bounds)
