"""Where to cut a trie that exceeds the limits, and whether a part carries its prefix or computes it again.

A dynamic programme over the places between neighbours in sorted order, run on many tries at once. ``best[m][b]`` is the
cheapest way to compute the first b sequences when the part behind them starts by carrying its prefix (m = 1) or by
computing it (m = 0). Neighbours that share a few rows are cut as ever; those that share a prompt become a chain.
"""

from collections.abc import Iterator

import numpy as np

from verl_pg_plugin.batching.chain_cuts import Cut, CutMaths
from verl_pg_plugin.layout.prefix_order import IntArray
from verl_pg_plugin.planning.order import FloatArray

CACHED_ELEMENTS = 32_768
"""Of an array over several tries, so that all arrays of a step stay in a core's cache."""
MANY_PARTS = 50
"""A large trie that has so many parts is not cut again to make them of one size."""


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


def _alike(by_size: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """Tries of similar size, in batches."""
    batch: list[int] = []
    for i in by_size:
        if batch and (sizes[i] > 1.25 * sizes[batch[0]] or sizes[i] * len(batch) > CACHED_ELEMENTS):
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
        """The cheapest cuts, then the smallest budget, to within 1%, that costs no more: parts of one size.

        Large tries get two more passes, and none where they have many parts: one that is left over is then less than
        2% of what the others could share, and the rest is due to the lengths of sequences.
        """
        limit, weights = self.maths.limits.max_rows, self.maths.weights
        total = self.new_before[np.arange(len(self.sizes)), self.sizes]
        most = total + (weights.carried + weights.owed) * self.shared.max(axis=1)
        most += self.maths.limits.copies.weight * (self.keys_before.max(axis=1) + self.keys_counted.sum(axis=1))
        high = np.minimum(most, np.inf if limit is None else limit)
        cheapest, choices = self._solve(high, np.arange(len(self.tries)))
        cuts = self._trace(choices)
        low = np.minimum(np.ceil(total / [len(parts) for parts in cuts]), high) - 1
        mean = np.array([self._mean_taken(parts) for parts in cuts])
        large = self.sizes.max() > 512
        settled = large & (np.array([len(parts) for parts in cuts]) >= MANY_PARTS)
        for _ in range(2 if large else 12):
            open_ = (high - low > np.maximum(high / 100, 1)) & ~settled
            if not open_.any():
                break
            tries = np.flatnonzero(open_)
            middle = self._next_budget(low[tries], high[tries], mean[tries])
            cost, tighter = self._solve(middle, tries)
            enough = cost <= cheapest[tries] * (1 + 1e-9)
            high[tries] = np.where(enough, middle, high[tries])
            low[tries] = np.where(enough, low[tries], middle)
            choices[:, tries[enough]] = tighter[:, enough]
        return self._trace(choices)

    def _mean_taken(self, parts: list[Cut]) -> float:
        return sum(self.maths.taken(*pair) for pair in zip(parts, [*parts[1:], None], strict=True)) / len(parts)

    @staticmethod
    def _next_budget(low: FloatArray, high: FloatArray, mean: FloatArray) -> FloatArray:
        """Between ``low`` and ``high``: first near what parts take on average, then the middle."""
        budget = np.floor((low + high) / 2)
        for factor in (0.986, 0.995, 1.08, 1.02, 1.005):  # of several the last
            near = np.floor(factor * mean)
            budget = np.where((low < near) & (near < high), near, budget)
        return budget

    def _solve(self, budget: FloatArray, tries: IntArray) -> tuple[FloatArray, IntArray]:
        """Cost (g,) of all sequences, and the choices (2, g, n+1): 2 * first of the last part + whether it carries.

        Args:
            budget: (g,) of each trie.
            tries: (g,) places of the tries to solve.
        """
        search = _Search(self, budget, tries)
        num_tries, num_places = search.shared.shape
        # Cost up to a part that starts here and computes its prefix, or carries it.
        until = np.full((num_tries, 2, num_places), np.inf)
        until[:, 0, 0] = self.maths.costs.part
        entering = np.full((num_tries, 2, num_places), self.maths.costs.part)
        entering[:, 0] += search.shared
        chosen = np.zeros((2, num_tries, num_places), dtype=np.int64)
        least = np.zeros((2, num_tries, num_places))
        lowest = search.low.tolist()
        for first, stop in search.blocks():
            extra, start = search.extra_costs(first, stop), lowest[first]
            for b in range(first, stop):
                low = lowest[b]
                cost = until[None, :, :, low:b] + extra[b - first, :, :, :, low - start : b - start]
                cost = cost.reshape(2, num_tries, -1)
                chosen[:, :, b] = cost.argmin(axis=2)
                least[:, :, b] = found = cost.min(axis=2)
                until[:, :, b] = found.T + entering[:, :, b]
        width = np.arange(num_places) - search.low
        carries = chosen >= np.maximum(width, 1)
        choices = 2 * (search.low + chosen - width * carries) + carries
        return least[0, np.arange(num_tries), self.sizes[tries]], choices

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


class _Search:
    """What does not depend on the cost of earlier parts, for many ends b at once.

    Arrays are (g, n+1) by first or next sequence, and (g, k, w) for k ends in turn and the w places where a part that
    ends there may start.

    Attributes:
        low: (n+1,) a part that ends before b starts here at the earliest; never falls.
    """

    ELEMENTS = 16_384
    """Of an array over ends and starts: it stays in a core's cache."""

    def __init__(self, whole: _Tries, budget: FloatArray, tries: IntArray) -> None:
        maths = whole.maths
        self.weights, self.costs, self.copies = maths.weights, maths.costs, maths.limits.copies
        self.shared, self.new_before = whole.shared[tries], whole.new_before[tries]
        self.counted, self.num_places = whole.keys_counted[tries], self.shared.shape[1]
        self.export_all = self.costs.export * (self.shared + self.costs.part)
        # A part fits where its room, by its start, is no less than what is used before its end: of the rows that it
        # computes and carries, and where copies are counted of rows and copied keys less the free ones.
        self.room = [budget[:, None] + self.new_before - row * self.shared for row in (1.0, self.weights.carried)]
        self.used = self.new_before
        weight, free = self.copies.weight, self.copies.weight * self.copies.free
        if weight:
            keys_before = whole.keys_before[tries]
            behind = np.append(keys_before[:, 1:], keys_before[:, -1:], axis=1)
            own = weight * (whole.keys_alone[tries] - behind) + free * self.new_before
            self.room_of_copies = [self.room[0] - own + free * self.shared, self.room[1] - own]
            self.used_of_copies = (1 - free) * self.new_before + weight * keys_before
        self.low = self._earliest(maths.limits.max_sequences or self.num_places)
        # Rows above which a part that starts here has no branching yet, and keys in front of its branchings that an
        # earlier part has as well, see ``KeysOfNeighbours``.
        self.unbranched, self.prefix = self.shared + 0.5, np.zeros_like(self.shared)

    def _earliest(self, max_sequences: int) -> IntArray:
        ends = np.arange(self.num_places)
        low = np.maximum(ends - 1, 0)
        for g in range(len(self.shared)):
            room = np.maximum.accumulate(np.maximum(self.room[0][g], self.room[1][g]))
            of_trie = np.searchsorted(room, self.used[g])
            if self.copies.weight:
                room = np.maximum.accumulate(np.maximum(self.room_of_copies[0][g], self.room_of_copies[1][g]))
                of_trie = np.maximum(of_trie, np.searchsorted(room, self.used_of_copies[g]))
            low = np.minimum(low, of_trie)
        return np.minimum.accumulate(np.maximum(low, ends - max_sequences)[::-1])[::-1]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ends ``first <= b < stop``, as many at once as the cache holds."""
        first = 1
        while first < self.num_places:
            width = max(first - int(self.low[first]), 16)
            stop = min(first + max(min(width, self.ELEMENTS // (2 * width * len(self.shared))), 1), self.num_places)
            yield first, stop
            first = stop

    def extra_costs(self, first: int, stop: int) -> FloatArray:
        """Cost (k, 2, g, 2, w) of the parts that end before ``first <= b < stop``, but for what led to their start.

        By whether the next part carries its prefix and by whether this one does; infinite where it is not allowed.
        To be called once for each end, in order.
        """
        low = int(self.low[first])
        starts, ends, last = slice(low, stop - 1), slice(first, stop), slice(first - 1, stop - 1)
        shared, read = self.shared[:, None, starts], self.shared[:, ends, None]
        spare = self._spare(starts, ends)
        unbranched, prefix = self._grow(first, stop, starts)
        if self.copies.weight:
            spare = self._less_copies(spare, starts, ends, prefix)

        ending = np.arange(stop - first)
        single = (slice(None), ending, ending + first - 1 - low)  # parts of one sequence, which may keep less
        own = self.new_before[:, ends] - self.new_before[:, last]
        spare[0][single] += (1 - self.weights.recomputing) * (own + self.shared[:, last])
        spare[1][single] += (1 - self.weights.recomputing) * own
        spare[1][self.new_before[:, ends, None] == self.new_before[:, None, starts]] = -1.0  # no row of its own

        kept = np.minimum(np.floor(unbranched), read)  # by all sequences of the part
        missing = shared - kept
        exported = self.costs.export * (missing + self.costs.part * (missing > 0))
        cost = np.empty((stop - first, 2, len(self.shared), 2, stop - 1 - low))
        by_end = cost.transpose(1, 3, 2, 0, 4)
        by_end[1, 0] = np.where(spare[0] >= self.weights.owed * read, 0.0, np.inf)
        by_end[1, 1] = np.where(spare[1] >= self.weights.owed * (read - kept), exported, np.inf)
        spare[0][single] = np.inf  # a single sequence that reads nothing and hands nothing over always runs
        by_end[0, 0] = np.where(spare[0] >= 0, 0.0, np.inf)
        by_end[0, 1] = np.where(spare[1] >= 0, self.export_all[:, None, starts], np.inf)
        return cost

    def _grow(self, first: int, stop: int, starts: slice) -> tuple[FloatArray, FloatArray]:
        """``unbranched`` and ``prefix`` (g, k, w) of the parts that end before ``first <= b < stop``.

        A part that gets one sequence more branches where that parts from the one before it.
        """
        last = slice(first - 1, stop - 1)
        # Rows that the last sequence of a part shares with the one before it, where that is in the part too.
        inside = np.arange(starts.start, stop - 1) < np.arange(first - 1, stop - 1)[:, None]
        joined = np.where(inside, self.shared[:, last, None], np.inf)
        unbranched = np.empty((len(joined), stop - first + 1, stop - 1 - starts.start))
        unbranched[:, 0] = self.unbranched[:, starts]
        for k in range(stop - first):  # faster than ``np.minimum.accumulate``, and so is the sum below
            np.minimum(unbranched[:, k], joined[:, k], out=unbranched[:, k + 1])
        prefix, counted = self.prefix[:, None, starts], self.counted[:, last, None]
        if counted.any():
            again = np.where(joined < unbranched[:, :-1], counted, 0.0)
            for k in range(stop - first):
                again[:, k] += again[:, k - 1] if k else self.prefix[:, starts]
            prefix, self.prefix[:, starts] = again, again[:, -1]
        self.unbranched[:, starts] = unbranched[:, -1]
        return unbranched[:, 1:], prefix

    def _spare(self, starts: slice, ends: slice) -> list[FloatArray]:
        """Rows (g, k, w) that parts leave of the budget: computing their prefix, carrying it."""
        used = self.used[:, ends, None]
        return [room[:, None, starts] - used for room in self.room]

    def _less_copies(self, spare: list[FloatArray], starts: slice, ends: slice, prefix: FloatArray) -> list[FloatArray]:
        """What copied keys leave of it; ``prefix`` are the keys in front of branchings, of parts that compute it."""
        used = self.used_of_copies[:, ends, None]
        computing, carrying = (room[:, None, starts] - used for room in self.room_of_copies)
        computing -= self.copies.weight * prefix
        ending = np.arange(ends.stop - ends.start)
        computing[:, ending, ending + ends.start - 1 - starts.start] = np.inf  # a sequence by itself copies nothing
        return [np.minimum(spare[0], computing), np.minimum(spare[1], carrying)]
