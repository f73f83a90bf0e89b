"""What neighbours in prefix order cost together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from verl_pg_plugin.layout.order import IntArray, PrefixOrder

FloatArray: TypeAlias = NDArray[np.float64]
SegmentPrice: TypeAlias = Callable[[IntArray, IntArray, IntArray], FloatArray]
"""Cost of each of S segments from (S,) rows they share, (S,) rows they have and (S,) rows of those with the head, as
``cost.flops.ModelFlops.segments`` gives it."""


@dataclass(frozen=True)
class Run:
    """Neighbours ``first <= k < stop`` in prefix order, with what they cost in a place of their own."""

    first: int
    stop: int
    cost: float

    @property
    def size(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class RunPrices:
    """Prices of all runs of one order.

    Attributes:
        order: B sequences and what they share with the one before.
        response_lengths: (B,) of the sequences, in the caller's order: so many of a sequence's last rows run the head.
        price: of segments.
    """

    order: PrefixOrder
    response_lengths: IntArray
    price: SegmentPrice

    @cached_property
    def new(self) -> FloatArray:
        """(B,) cost of the rows that a sequence adds to those before it."""
        rows, shared = self.order.num_new, self.order.num_shared
        return self.price(shared, rows, np.minimum(self.response_lengths[self.order.sequences], rows))

    @cached_property
    def again(self) -> FloatArray:
        """(B,) cost of computing once more what a sequence shares: what a cut in front of it costs."""
        none = np.zeros_like(self.order.num_shared)
        return self.price(none, self.order.num_shared, none)

    @cached_property
    def _before(self) -> FloatArray:
        return np.append(0.0, np.cumsum(self.new))

    def run(self, first: int, stop: int) -> Run:
        """The run with its price."""
        return Run(first, stop, float(self.again[first] + self._before[stop] - self._before[first]))

    def counted_twice(self, runs: Sequence[Run]) -> IntArray:
        """Rows that each run but the first would share with the one before it, where all are computed in one place."""
        ascending = sorted(runs, key=lambda run: run.first)
        # Where nothing lies between two runs, that is what the second begins with.
        common = [self.order.num_shared[a.stop : b.first + 1].min() for a, b in pairwise(ascending)]
        return np.array(common, dtype=np.int64)

    def together(self, runs: Sequence[Run]) -> float:
        """Cost of runs that are computed in one place: what parts of one group share is computed once."""
        twice = self.counted_twice(runs)
        none = np.zeros_like(twice)
        return sum(run.cost for run in runs) - float(self.price(none, twice, none).sum())

    def cheapest_cut(self, run: Run, at_most: int) -> int:
        """Where to cut a run in two so that the first part has at most so many sequences and least is done again.

        Of cuts that cost the same the one that leaves most in the first part.
        """
        places = np.arange(min(run.stop - 1, run.first + at_most), run.first, -1)
        return int(places[self.again[places].argmin()])

    def branches(self, run: Run) -> list[Run]:
        """A run cut wherever its sequences share least: sessions of a prompt, or responses."""
        shared = self.order.num_shared[run.first + 1 : run.stop]
        forks = run.first + 1 + np.flatnonzero(shared == shared.min(initial=np.iinfo(np.int64).max))
        return [self.run(first, stop) for first, stop in pairwise([run.first, *forks.tolist(), run.stop])]
