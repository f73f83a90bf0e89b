"""Keys and values that attention copies for sequences which share rows, and what they take of a micro-batch's budget.

A segment reads its ancestors' rows, so its keys, ancestors' and own, are gathered into one piece
(``attention.packed_rows``): a prompt is copied for every response. Under gradient checkpointing only one layer's copies
live at a time, and the memory in which a layer's MLP works has room for a few per row; 256 responses of 64 tokens to a
prompt of 8192 make 86 per row.

What a copy takes most of is its gradients. A backward that reads trunks where they lie (``layout.trunk_reads``) copies
none of them, but not in parts of a chain, which join carried rows and own ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_pg_plugin.layout import PrefixOrder
from verl_pg_plugin.layout.prefix_order import IntArray

COPIES_PER_ROW = 3


@dataclass(frozen=True)
class CopiedKeys:
    """What copies take of a budget of computed rows.

    Attributes:
        weight: a copied key with its value, in computed rows; 0 where copies are not counted.
        free: copies for each computed row that take nothing: a layer's MLP needs as much memory at another time.
        without_gradients: the same of copies whose gradients are none; None where the backward copies what the forward
            copies.
    """

    weight: float = 0.0
    free: float = 1.0
    without_gradients: CopiedKeys | None = None

    def take(self, keys: int, rows: int) -> float:
        """Rows of the budget that the copies of a micro-batch of ``rows`` rows take."""
        return self.weight * max(keys - self.free * rows, 0.0)

    def take_alone(self, keys: int, rows: int, below_trunks: int) -> float:
        """The same of a micro-batch that carries nothing.

        Args:
            below_trunks: keys that are left where trunks are not copied, see ``KeysBelowTrunks``. A backward that
                would copy few of trunks copies them after all.
        """
        if self.without_gradients is None:
            return self.take(keys, rows)
        in_backward = min(keys, below_trunks + COPIES_PER_ROW * rows)
        return max(self.without_gradients.take(keys, rows), self.take(in_backward, rows))

    def take_each(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The same for many micro-batches."""
        return self.weight * np.maximum(keys - self.free * rows, 0.0)


class KeysOfNeighbours:
    """Keys of neighbours ``first <= k < stop`` of a sorted order, computed together.

    As many as the layout of that part gathers, wherever in a trie it begins and ends.

    Attributes:
        before: (B+1,) keys that each sequence adds to those of the sequences before it, summed.
        counted: (B,) keys of the segment that ends where a sequence branches off, where ``before`` has counted them
            with an earlier sequence: a part that begins between the two has to count them again.
    """

    def __init__(self, order: PrefixOrder) -> None:
        self.order = order
        added, self.counted = _added(order)
        self.before = np.append(0, np.cumsum(added))
        self._before, self._rows, self._shared = (
            self.before.tolist(),
            order.num_rows.tolist(),
            order.num_shared.tolist(),
        )
        # The next sequence that branches off what this one shares with the one before it, at its end or further up.
        self._at, self._below = (_next_below(self._shared, strict) for strict in (False, True))
        self._counted = self.counted.tolist()

    def of(self, first: int, stop: int, carries: bool) -> int:
        """Keys that a part copies; its prefix is carried, or computed with it."""
        if carries:
            return self._rows[first] + self._before[stop] - self._before[first + 1]
        if stop == first + 1:
            return 0
        keys, place = self._rows[first] + self._before[stop] - self._before[first + 1], self._at[first]
        while place < stop:
            keys += self._counted[place]
            place = self._below[place]
        return keys

    def of_each(self, first: IntArray | int, stop: IntArray | int, carries: bool) -> IntArray:
        """The same for many parts at once."""
        keys = self.order.num_rows[first] + self.before[stop] - self.before[np.add(first, 1)]
        if carries:
            return keys
        counted, below = np.append(self.counted, 0), np.array([*self._below, len(self._below)])
        place = np.array(self._at)[first]
        while (inside := np.less(place, stop)).any():
            keys = keys + np.where(inside, counted[place], 0)
            place = np.where(inside, below[place], place)
        return np.where(np.equal(stop, np.add(first, 1)), 0, keys)


def _next_below(shared: list[int], strict: bool) -> list[int]:
    """For each number the place of the next that is smaller, or as small; their count where there is none."""
    places = [len(shared)] * len(shared)
    waiting: list[int] = []
    for k, rows in enumerate(shared):
        while waiting and (shared[waiting[-1]] > rows or (not strict and shared[waiting[-1]] == rows)):
            places[waiting.pop()] = k
        waiting.append(k)
    return places


def _added(order: PrefixOrder) -> tuple[IntArray, IntArray]:
    """(B,) keys of the segments that each sequence adds to the trie of all before it.

    And (B,) keys of the segment that ends where it branches off, if another has branched off there before.
    """
    added, counted = order.num_rows.copy(), np.zeros_like(order.num_rows)
    forks: list[list[int]] = []  # rows in front of each branching on the way to the last sequence, and whether it cuts
    before = 0
    for k, (rows, shared) in enumerate(zip(order.num_rows.tolist(), order.num_shared.tolist(), strict=True)):
        while forks and forks[-1][0] > shared:
            forks.pop()
        if shared and not (forks and forks[-1][0] == shared):
            forks.append([shared, False])
        if shared and forks[-1][1]:
            counted[k] = shared
        if rows == shared:
            added[k] = 0
        elif shared and shared == before:  # it alone goes on where the one before it ends
            added[k] = rows - shared
        elif shared and not forks[-1][1]:
            added[k] += shared
            forks[-1][1] = True
        before = rows
    return added, counted
