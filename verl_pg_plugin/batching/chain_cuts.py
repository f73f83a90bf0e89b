"""What cutting a trie costs and takes: parts, the memory of what they carry, and the price of computing it again."""

import math
from dataclasses import dataclass

import numpy as np

from verl_pg_plugin.batching.copied_keys import KeysOfNeighbours
from verl_pg_plugin.batching.keys_below_trunks import copies_alone
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits
from verl_pg_plugin.layout import PrefixOrder

PART_COST = 350.0
"""Fixed cost of a micro-batch in rows of an update: gathered weights, launches, the head's own.

Measured on one H200, Qwen3-8B shape, where a row takes 0.18 ms: the same rows in 12 micro-batches more take 61 ms each
(docs/data/actor_8b_carried_n64.csv), in 7 more 126 ms each, 70 ms in another run (actor_8b_carried.csv).
"""
EXPORT_COST = 0.25
"""An exported row in rows of an update: one forward of a forward, its recomputation and a backward.

In the same data a row of old_log_prob, head and entropy included, takes 0.26 of one of an update.
"""


@dataclass(frozen=True)
class CarryWeights:
    """What a row that is not computed takes of the budget, relative to a computed one.

    Attributes:
        carried: keys and values of a row that is read, and in training the sums of their gradients.
        owed: a row handed over: what later parts read of it, or the sums that they owe to it.
        recomputing: a computed row where attention is not kept for the backward but run again: less than 1 where it is
            kept otherwise. A part of a single sequence, which cannot be cut, may run so.
    """

    carried: float = 0.0
    owed: float = 0.0
    recomputing: float = 1.0


@dataclass(frozen=True)
class CarryCosts:
    """What cutting costs, in rows of a micro-batch that is computed whole (forward, backward and recomputation).

    Attributes:
        export: a row that is exported, computed once more without gradient; 0 in forward-only phases, which have none.
        part: a micro-batch, whatever its size: gathered weights, launches. An export pays its share of one.
    """

    export: float
    part: float


@dataclass(frozen=True)
class Cut:
    """Neighbours ``first <= k < stop`` of the sorted order; their prefix is carried, or computed with them."""

    first: int
    stop: int
    carries: bool

    @property
    def sequences(self) -> int:
        return self.stop - self.first


class CutMaths:
    """Rows of neighbours in sorted order, and what a part takes of the budget."""

    def __init__(self, order: PrefixOrder, limits: MicroBatchLimits, weights: CarryWeights, costs: CarryCosts) -> None:
        self.order, self.limits, self.weights, self.costs = order, limits, weights, costs
        self.new_before = np.concatenate([[0], np.cumsum(order.num_new)])
        self.keys = KeysOfNeighbours(order)
        self._alone = copies_alone(order, limits.copies)
        # Scalars out of lists: out of arrays they take longer than what is done with them.
        self._new, self._shared = self.new_before.tolist(), order.num_shared.tolist()

    def rows(self, cut: Cut) -> int:
        """Rows that a part computes."""
        new = self._new[cut.stop] - self._new[cut.first]
        return new if cut.carries else new + self._shared[cut.first]

    def carried(self, cut: Cut) -> int:
        return self._shared[cut.first] if cut.carries else 0

    def read_next(self, following: Cut | None) -> int:
        return 0 if following is None else self.carried(following)

    def keep(self, cut: Cut, following: Cut | None) -> int:
        """Leading rows that the part and the one after it both carry."""
        most = min(self.carried(cut), self.read_next(following))
        return min(most, min(self._shared[cut.first + 1 : cut.stop], default=most))

    def taken(self, cut: Cut, following: Cut | None, row: float = 1.0) -> float:
        """Of the row budget, where a computed row takes ``row``."""
        owed = self.read_next(following) - self.keep(cut, following)
        rows = self.rows(cut)
        copies = self.limits.copies.take(self.keys.of(cut.first, cut.stop, cut.carries), rows)
        return row * rows + copies + self.weights.carried * self.carried(cut) + self.weights.owed * owed

    def exceeds(self, cut: Cut, following: Cut | None) -> bool:
        """Whether the part takes more than the row budget as it is, with attention kept for its backward."""
        return self.limits.max_rows is not None and self.taken(cut, following) > self.limits.max_rows

    def admit_whole(self, group: Cut) -> bool:
        """Whether a group meets the limits as one micro-batch. A single sequence always does: it must run."""
        if group.sequences == 1:
            return True
        rows = self.rows(group)
        return self.limits.admit(rows + math.ceil(self._alone(group.first, group.stop, rows)), group.sequences)
