"""Cut groups where that lets the slowest finish earlier: branches of one size change places."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verl_pg_plugin.batching.runs import FloatArray, Run, RunPrices
from verl_pg_plugin.layout.order import IntArray

CANDIDATES = 4
"""Cheap cells that the costliest one may trade with."""


@dataclass(frozen=True, order=True)
class Branch:
    """A run behind the fork that all branches of its group share.

    Attributes:
        cost: of the rows that are its own.
        first: of the run.
        group: whose prompt it needs beside it.
    """

    cost: float
    first: int
    group: int = field(compare=False)
    run: Run = field(compare=False)


class _Cell:
    """The branches of one mini-batch of one rank; each group's prompt is paid for once."""

    def __init__(self, branches: Sequence[Branch], prompt_cost: dict[int, float]) -> None:
        self.prompt_cost = prompt_cost
        self.by_size: dict[int, list[Branch]] = {}
        self._costs: dict[int, FloatArray] = {}
        self.groups: Counter[int] = Counter()
        self.cost = 0.0
        for branch in branches:
            self.add(branch)

    def costs(self, size: int) -> FloatArray:
        """Of its branches of a size, ascending as they are."""
        if size not in self._costs:
            self._costs[size] = np.array([branch.cost for branch in self.by_size.get(size, ())])
        return self._costs[size]

    def add(self, branch: Branch) -> None:
        self._costs.pop(branch.run.size, None)
        insort(self.by_size.setdefault(branch.run.size, []), branch)
        self.cost += branch.cost + (0 if self.groups[branch.group] else self.prompt_cost[branch.group])
        self.groups[branch.group] += 1

    def remove(self, branch: Branch) -> None:
        self._costs.pop(branch.run.size, None)
        self.by_size[branch.run.size].remove(branch)
        self.groups[branch.group] -= 1
        self.cost -= branch.cost + (0 if self.groups[branch.group] else self.prompt_cost[branch.group])

    def cost_after(self, leaves: Branch, enters: Branch) -> float:
        """What it costs once two branches have changed places."""
        cost = self.cost - leaves.cost + enters.cost
        if leaves.group == enters.group:
            return cost
        if self.groups[leaves.group] == 1:
            cost -= self.prompt_cost[leaves.group]
        if not self.groups[enters.group]:
            cost += self.prompt_cost[enters.group]
        return cost


def swap_branches(cells: Sequence[Sequence[Run]], sorted_group: IntArray, prices: RunPrices) -> list[list[Run]]:
    """The runs of each cell after branches of one size have changed places, the best exchange of the costliest first.

    An exchange is made where both cells are cheaper afterwards than the costliest was, the prompts that it computes
    once more included.

    Args:
        cells: runs of each mini-batch of each rank.
        sorted_group: (B,) group of each sequence, in prefix order.
        prices: of runs.
    """
    prompt_cost = _prompt_costs(sorted_group, prices)
    branches_of = [
        [(part, int(sorted_group[part.first])) for run in runs for part in prices.branches(run)] for runs in cells
    ]
    of_cells = [
        _Cell([Branch(run.cost - prompt_cost[group], run.first, group, run) for run, group in branches], prompt_cost)
        for branches in branches_of
    ]
    costs = np.array([cell.cost for cell in of_cells])
    for _ in range(16 * len(of_cells)):
        costliest = int(costs.argmax())
        exchange = _best_exchange(of_cells, costs, costliest)
        if exchange is None:
            break
        other, mine, theirs = exchange
        for number, leaves, enters in ((costliest, mine, theirs), (other, theirs, mine)):
            of_cells[number].remove(leaves)
            of_cells[number].add(enters)
            costs[number] = of_cells[number].cost
    return [[branch.run for branches in cell.by_size.values() for branch in branches] for cell in of_cells]


def _prompt_costs(sorted_group: IntArray, prices: RunPrices) -> dict[int, float]:
    """By group, the cost of the rows that all of its sequences share; none for a group of one."""
    starts = np.flatnonzero(np.append(True, sorted_group[1:] != sorted_group[:-1]))
    again = prices.again.copy()
    again[starts] = np.inf
    least = np.minimum.reduceat(again, starts)
    return dict(zip(sorted_group[starts].tolist(), np.where(np.isinf(least), 0.0, least).tolist(), strict=True))


def _best_exchange(cells: Sequence[_Cell], costs: FloatArray, costliest: int) -> tuple[int, Branch, Branch] | None:
    """Which cell the costliest should trade with, and what for what."""
    mine = cells[costliest]
    few = min(CANDIDATES, len(cells) - 1)
    best: tuple[float, int, Branch, Branch] | None = None
    for other in np.argpartition(costs, few)[:few].tolist():
        theirs = cells[other]
        half = (mine.cost - theirs.cost) / 2
        for size, branches in mine.by_size.items():
            values, their_values = mine.costs(size), theirs.costs(size)
            if not len(values) or not len(their_values):
                continue
            near = np.minimum(np.searchsorted(their_values, values - half), len(their_values) - 1)
            m = int(np.abs(values - their_values[near] - half).argmin())
            leaves, enters = branches[m], theirs.by_size[size][near[m]]
            left = max(mine.cost_after(leaves, enters), theirs.cost_after(enters, leaves))
            if left < mine.cost * (1 - 1e-9) and (best is None or left < best[0]):
                best = left, other, leaves, enters
    return best and best[1:]
