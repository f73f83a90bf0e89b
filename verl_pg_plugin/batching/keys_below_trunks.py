"""Keys that sequences which share rows read below the trunks of their trees, while micro-batches are planned.

``layout.trunk_reads`` finds the trunks of a micro-batch once it is laid out. Here they are what all sequences of a tree
begin with, or, where that leaves fewer keys, what each of its branches begins with below that: prompts below a chat
template. A micro-batch of some of these sequences could take the same trunks, so it leaves no more keys than these do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from verl_pg_plugin.batching.copied_keys import CopiedKeys, KeysOfNeighbours
from verl_pg_plugin.layout import PrefixOrder
from verl_pg_plugin.layout.prefix_order import IntArray


@dataclass(frozen=True)
class _Trunks:
    """Of each sequence of a sorted order the rows ``start <= row < stop`` of its trunk, both (B,); none if equal."""

    start: IntArray
    stop: IntArray

    @classmethod
    def below(cls, order: PrefixOrder, start: IntArray) -> _Trunks:
        """Begin with row ``start`` (B,) and end where the first of the sequences that share this row branches off."""
        first = np.flatnonzero(order.num_shared <= start)
        sizes = np.diff([*first, len(start)])
        shared = order.num_shared.copy()
        shared[first] = order.num_rows[first]
        stop = np.minimum.reduceat(shared, first)
        return cls(start, np.where(np.repeat(sizes, sizes) > 1, np.repeat(stop, sizes), start))

    @property
    def keys(self) -> IntArray:
        """(B,) of the segment that ends with the trunk."""
        return np.where(self.stop > self.start, self.stop, 0)

    def begin(self, order: PrefixOrder) -> NDArray[np.bool_]:
        """(B,) whether a sequence is the first of its trunk's."""
        return order.num_shared <= self.start

    def left_out(self, order: PrefixOrder) -> PrefixOrder:
        """The sequences without the rows of their trunks."""
        shared = np.clip(order.num_shared, self.start, self.stop) - self.start
        return replace(order, num_rows=order.num_rows - (self.stop - self.start), num_shared=order.num_shared - shared)


class KeysBelowTrunks:
    """Keys of neighbours ``first <= k < stop`` of a sorted order, computed together, that are read through no trunk."""

    def __init__(self, order: PrefixOrder) -> None:
        upper = _Trunks.below(order, np.zeros_like(order.num_rows))
        lower = _Trunks.below(order, upper.stop)
        starts, tree = np.flatnonzero(order.num_shared == 0), np.cumsum(order.num_shared == 0) - 1
        of_upper, of_lower = (np.add.reduceat(_added(order, trunks), starts) for trunks in (upper, lower))
        take_lower = (of_lower < of_upper)[tree]
        trunks = _Trunks(np.where(take_lower, lower.start, upper.start), np.where(take_lower, lower.stop, upper.stop))
        self._below = KeysOfNeighbours(trunks.left_out(order))
        self._keys = trunks.keys.tolist()
        self._keys_before = [0, *np.cumsum(np.where(trunks.begin(order), trunks.keys, 0)).tolist()]

    def of(self, first: int, stop: int) -> int:
        """At most so many, with those of the segments that end with a trunk."""
        if stop == first + 1:
            return 0
        of_trunks = self._keys[first] + self._keys_before[stop] - self._keys_before[first + 1]
        return self._below.of(first, stop, carries=False) + of_trunks


def _added(order: PrefixOrder, trunks: _Trunks) -> IntArray:
    """(B,) keys that each sequence adds to those of the sequences before it."""
    below = np.diff(KeysOfNeighbours(trunks.left_out(order)).before)
    return below + np.where(trunks.begin(order), trunks.keys, 0)


def copies_alone(order: PrefixOrder, copies: CopiedKeys) -> Callable[[int, int, int], float]:
    """What neighbours ``first <= k < stop`` that carry nothing take of a budget for copies, beside so many rows."""
    if not copies.weight:
        return lambda first, stop, rows: 0.0
    keys = KeysOfNeighbours(order)
    below = None if copies.without_gradients is None else KeysBelowTrunks(order)

    def taken(first: int, stop: int, rows: int) -> float:
        copied = keys.of(first, stop, carries=False)
        return copies.take_alone(copied, rows, copied if below is None else below.of(first, stop))

    return taken
