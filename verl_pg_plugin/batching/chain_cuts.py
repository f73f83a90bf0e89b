"""Where to cut a trie that exceeds the limits, and whether a part carries its prefix or computes it again.

A dynamic programme over the places between neighbours in sorted order, run on many tries at once. ``best[m][b]`` is the
cheapest way to compute the first b sequences when the part behind them starts by carrying its prefix (m = 1) or by
computing it (m = 0). Neighbours that share a few rows are cut as ever; those that share a prompt become a chain.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_pg_plugin.batching.copied_keys import KeysOfNeighbours
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits
from verl_pg_plugin.layout import PrefixOrder
from verl_pg_plugin.layout.prefix_order import IntArray

PART_COST = 350.0
"""Fixed cost of a micro-batch in rows of an update: gathered weights, launches, the head's own.

Measured on one H200, Qwen3-8B shape, where a row takes 0.18 ms: the same rows in 12 micro-batches more take 61 ms each
(docs/data/actor_8b_carried_n64.csv), in 7 more 126 ms each, 70 ms in another run (actor_8b_carried.csv).
"""
EXPORT_COST = 0.25
"""An exported row in rows of an update: one forward of a forward, its recomputation and a backward.

In the same data a row of old_log_prob, head and entropy included, takes 0.26 of one of an update.
"""

FloatArray = NDArray[np.float64]


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
        few = self.limits.max_sequences is None or group.sequences <= self.limits.max_sequences
        return few and not self.exceeds(group, None)


def cut_tries(maths: CutMaths, tries: list[tuple[int, int]]) -> list[list[Cut]]:
    """Cheapest parts of every trie, of equal size where that costs no more.

    Args:
        maths: the mini-batch, what a part may hold and what cutting costs.
        tries: ``first, stop`` in sorted order of each; its sequences all share a row.
    """
    cuts: list[list[Cut]] = [[] for _ in tries]
    by_size = sorted(range(len(tries)), key=lambda i: tries[i][1] - tries[i][0])
    for members in _alike(by_size, [stop - first for first, stop in tries]):
        some = _Tries(maths, [tries[i] for i in members])
        for i, found in zip(members, some.cheapest_equal(), strict=True):
            cuts[i] = found
    return cuts


def _alike(by_size: list[int], sizes: list[int], elements: int = 32_768) -> Iterator[list[int]]:
    """Tries of similar size, in batches of arrays that stay in a core's cache."""
    batch: list[int] = []
    for i in by_size:
        if batch and (sizes[i] > 1.25 * sizes[batch[0]] or sizes[i] * len(batch) > elements):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


class _Tries:
    """The dynamic programme on G tries of at most n sequences; arrays are (G, n+1), by first or next sequence."""

    def __init__(self, maths: CutMaths, tries: list[tuple[int, int]]) -> None:
        self.maths, self.tries = maths, tries
        self.sizes = np.array([stop - first for first, stop in tries])
        shape = len(tries), int(self.sizes.max()) + 1
        self.shared = np.zeros(shape)
        new = np.full(shape, 1e15)  # nothing fits behind the end of a trie
        num_new, added = np.diff(maths.new_before), np.diff(maths.keys.before)
        self.keys_before, self.keys_alone, self.keys_counted = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for g, (first, stop) in enumerate(tries):
            # The trie's first sequence shares no row with the one before, or none that this trie may use.
            self.shared[g, 1 : stop - first] = maths.order.num_shared[first + 1 : stop]
            new[g, : stop - first] = num_new[first:stop]
            new[g, 0] = maths.order.num_rows[first]
            self.keys_alone[g, : stop - first] = maths.order.num_rows[first:stop]
            self.keys_counted[g, 1 : stop - first] = maths.keys.counted[first + 1 : stop]
            self.keys_before[g, 1 : stop - first + 1] = np.cumsum(added[first:stop])
        self.new_before = np.concatenate([np.zeros((len(tries), 1)), np.cumsum(new, axis=1)[:, :-1]], axis=1)

    def cheapest_equal(self) -> list[list[Cut]]:
        """The cheapest cuts, then the smallest budget, to within 1%, that costs no more: parts of one size."""
        limit, weights = self.maths.limits.max_rows, self.maths.weights
        total = self.new_before[np.arange(len(self.sizes)), self.sizes]
        most = total + (weights.carried + weights.owed) * self.shared.max(axis=1)
        most += self.maths.limits.copies.weight * (self.keys_before.max(axis=1) + self.keys_counted.sum(axis=1))
        high = np.minimum(most, np.inf if limit is None else limit)
        cheapest, choices = self._solve(high)
        cuts = self._trace(choices)
        low = np.minimum(np.ceil(total / [len(parts) for parts in cuts]), high) - 1
        # Each pass over a large trie takes long, and the more parts it has the nearer they are to one size as it is.
        for _ in range(12 if self.sizes.max() <= 512 else 2):
            if (high - low <= np.maximum(high / 100, 1)).all():
                break
            middle = np.floor((low + high) / 2)
            cost, tighter = self._solve(middle)
            enough = cost <= cheapest * (1 + 1e-9)
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
            choices = np.where(enough[:, None], tighter, choices)
        return self._trace(choices)

    def _solve(self, budget: FloatArray) -> tuple[FloatArray, IntArray]:
        """Cost (G,) of all sequences, and the choices (2, G, n+1): 2 * first of the last part + whether it carries."""
        weights, costs, shared, new_before = self.maths.weights, self.maths.costs, self.shared, self.new_before
        num_tries, num_places = shared.shape
        max_sequences, copies = self.maths.limits.max_sequences or num_places, self.maths.limits.copies
        # Rows before the end of a part that starts here, at most: computing its prefix, carrying it.
        room = np.stack(
            [budget[:, None] + new_before - shared, budget[:, None] + new_before - weights.carried * shared]
        )
        # Cost up to a part that starts here and computes its prefix, or carries it; to export all of that prefix.
        until = np.full((2, num_tries, num_places), np.inf)
        until[0, :, 0] = costs.part
        export_all = costs.export * (shared + costs.part)
        common = np.empty_like(shared)  # rows common to all sequences of a part that starts here, and its predecessor
        # Rows above which a part that starts here has no branching yet, and keys in front of its branchings that an
        # earlier part has as well, see ``KeysOfNeighbours``.
        unbranched, prefix = shared + 0.5, np.zeros_like(shared)
        choices = np.zeros((2, num_tries, num_places), dtype=np.int64)
        total, low = np.zeros(num_tries), 0
        for b in range(1, num_places):
            rows, read = new_before[:, b, None], shared[:, b, None]
            low = max(low, b - max_sequences)
            while low < b - 1 and (new_before[:, b] - new_before[:, low] > budget).all():
                low += 1
            w = slice(low, b)
            common[:, b - 1] = shared[:, b - 1]
            np.minimum(common[:, low : b - 1], shared[:, b - 1, None], out=common[:, low : b - 1])
            kept = np.minimum(common[:, w], read)
            missing = shared[:, w] - kept
            spare = room[:, :, w] - rows
            if copies.weight:
                last, above = shared[:, b - 1, None], slice(low, b - 1)
                prefix[:, above] += (last < unbranched[:, above]) * self.keys_counted[:, b - 1, None]
                np.minimum(unbranched[:, above], last, out=unbranched[:, above])
                spare -= copies.take_each(*self._copied(w, b, prefix[:, w]))
            spare[:, :, -1] += (1 - weights.recomputing) * (rows - new_before[:, w])[
                :, -1
            ]  # a single sequence may keep less
            spare[0, :, -1] += (1 - weights.recomputing) * shared[:, b - 1]
            spare[1, rows == new_before[:, w]] = -1.0  # no part is without a row of its own
            # By the start of the next part (computes its prefix, carries it) and by the start of this one.
            cost = np.empty((2, 2, num_tries, b - low))
            cost[:] = until[:, :, w]
            cost[0, 1] += export_all[:, w]
            cost[1, 1] += costs.export * (missing + costs.part * (missing > 0))
            handing = spare.copy()
            handing[0] -= weights.owed * read
            handing[1] -= weights.owed * (read - kept)
            cost[1, handing < 0] = np.inf
            spare[0, :, -1] = np.inf  # a single sequence that reads nothing and hands nothing over always runs
            cost[0, spare < 0] = np.inf
            at, least = cost.argmin(axis=3), cost.min(axis=3)
            carries = least[:, 1] < least[:, 0]
            choices[:, :, b] = 2 * (low + np.where(carries, at[:, 1], at[:, 0])) + carries
            until[:, :, b] = np.minimum(least[:, 0], least[:, 1]) + costs.part
            total = np.where(self.sizes == b, until[0, :, b] - costs.part, total)
            until[0, :, b] += shared[:, b]
        return total, choices

    def _copied(self, starts: slice, b: int, prefix: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Keys (2, G, w) that parts which end before b copy, and their rows: computing their prefix, carrying it.

        Args:
            starts: of the parts.
            b: sequences in front of their end.
            prefix: (G, w) keys in front of their branchings, where they compute their prefix.
        """
        shared, after = self.shared[:, starts], slice(starts.start + 1, starts.stop + 1)
        keys = self.keys_alone[:, starts] + self.keys_before[:, b, None] - self.keys_before[:, after]
        rows = self.new_before[:, b, None] - self.new_before[:, starts]
        both = np.stack([keys + prefix, keys])
        both[0, :, -1] = 0.0  # a sequence by itself
        return both, np.stack([rows + shared, rows])

    def _trace(self, choices: IntArray) -> list[list[Cut]]:
        """Parts of every trie, from its last to its first and turned round."""
        traced = []
        for (first, _), size, (plain, carrying) in zip(
            self.tries, self.sizes.tolist(), choices.transpose(1, 0, 2), strict=True
        ):
            parts, b, carries = [], size, False
            while b:
                choice = int((carrying if carries else plain)[b])
                a, carries = choice >> 1, bool(choice & 1)
                parts.append(Cut(first + a, first + b, carries))
                b = a
            traced.append(parts[::-1])
        return traced
