"""Deal sequences to ranks and mini-batches so that groups stay whole and every rank has as much to compute."""

import heapq
from dataclasses import dataclass

import numpy as np

from verl_pg_plugin.layout.prefix_order import IntArray

TOKENS_PER_SQUARED_LENGTH = 24576
"""Cost of a token in units of squared sequence length, for a 7B model: verl's ``calculate_workload``."""


@dataclass(frozen=True)
class Balance:
    """A new order of B sequences whose equal consecutive chunks are the ranks.

    Attributes:
        order: (B,) index of the sequence at each place; within a rank, equal consecutive chunks are mini-batches.
        rank_cost: (num_ranks,) deduplicated cost of each rank's chunk.
        num_cut_groups: groups that did not fit into one mini-batch of one rank.
    """

    order: IntArray
    rank_cost: IntArray
    num_cut_groups: int

    @property
    def slowest_over_mean(self) -> float:
        return float(self.rank_cost.max() / self.rank_cost.mean())


@dataclass
class _Cell:
    """One mini-batch of one rank while it fills up."""

    room: int
    cost: int
    members: list[int]


def balance_groups(
    group: IntArray, prompt_lengths: IntArray, response_lengths: IntArray, num_ranks: int, num_mini_batches: int = 1
) -> Balance:
    """Longest-processing-time-first over whole groups, with the same number of sequences in every mini-batch.

    A group costs its prompt once and each response with the attention to that prompt. Groups that fit nowhere
    whole are dealt last, to the mini-batches with most room, and pay their prompt in each.

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

    cells = [_Cell(room=len(group) // num_cells, cost=0, members=[]) for _ in range(num_cells)]
    # Cells by the room they have left, each a heap by cost: the cheapest cell that fits is the best of few tops.
    by_room: dict[int, list[tuple[int, int]]] = {cells[0].room: [(0, i) for i in range(num_cells)]}

    def put(chosen: int, rows: IntArray, cost: int) -> None:
        cell = cells[chosen]
        cell.room -= len(rows)
        cell.cost += cost
        cell.members.extend(rows.tolist())
        if cell.room:
            heapq.heappush(by_room.setdefault(cell.room, []), (cell.cost, chosen))

    leftover = []
    for g in sorted(range(len(members)), key=lambda g: -costs[g]):
        tops = [(heap[0], room) for room, heap in by_room.items() if room >= len(members[g]) and heap]
        if not tops:
            leftover.append(g)
            continue
        _, room = min(tops)
        put(heapq.heappop(by_room[room])[1], members[g], costs[g])
    for g in leftover:
        rows = members[g]
        while len(rows):
            room = max(room for room, heap in by_room.items() if heap)
            part, rows = rows[:room], rows[room:]
            cost = int(prompt_cost[part[0]] + response_cost[part].sum())
            put(heapq.heappop(by_room[room])[1], part, cost)

    cell_cost = np.array([cell.cost for cell in cells]).reshape(num_ranks, num_mini_batches)
    return Balance(
        order=np.concatenate([np.sort(cell.members) for cell in cells]),
        rank_cost=cell_cost.sum(axis=1),
        num_cut_groups=len(leftover),
    )


def _members(group: IntArray) -> list[IntArray]:
    """Sequence indices of each group."""
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    return np.split(order, bounds)
