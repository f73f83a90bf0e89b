"""Split parts of a mini-batch further where another rank has more of them: all ranks run as many."""

import heapq
from itertools import pairwise

import numpy as np

from verl_pg_plugin.batching.chain_cuts import Cut, CutMaths
from verl_pg_plugin.planning.order import FloatArray

LAST_RESORT = 1e12
"""Cost, in rows, of a part that exceeds the budget: more than any other, and still finite."""


def split_further(maths: CutMaths, cuts: list[Cut], at_least: int) -> list[Cut]:
    """Split the largest parts until there are ``at_least`` so many; both sides meet the limits and own a row.

    Args:
        maths: what parts take and cost.
        cuts: of the whole mini-batch, in sorted order.
        at_least: no more than there are sequences.
    """
    if len(cuts) >= at_least:
        return cuts
    after = {cut.first: following for cut, following in pairwise([*cuts, None]) if cut is not None}
    heap = [(-maths.rows(cut), cut.first, cut) for cut in cuts if cut.sequences > 1]
    heapq.heapify(heap)
    count = len(cuts)
    current = {cut.first: cut for cut in cuts}
    while count < at_least:
        _, _, cut = heapq.heappop(heap)
        following = after[cut.first]
        following = None if following is None else current[following.first]
        left, right = _halve(maths, cut, following)
        current[left.first], current[right.first] = left, right
        after[left.first], after[right.first] = right, following
        count += 1
        for half in (left, right):
            if half.sequences > 1:
                heapq.heappush(heap, (-maths.rows(half), half.first, half))
    return sorted(current.values(), key=lambda cut: cut.first)


def _halve(maths: CutMaths, cut: Cut, following: Cut | None) -> tuple[Cut, Cut]:
    """Of all places and ways to start the halves, the one with the least cost and largest half.

    There always is one: the last sequence computed alone; where the first adds no row, that one computed alone. Only
    here, where ranks must agree on a number, may a single sequence exceed the budget, if nothing else is left.
    """
    starts = [(left, right) for left in {cut.carries, False} for right in (True, False)]
    scores = [_half_scores(maths, cut, following, left, right) for left, right in starts]
    way, place = np.unravel_index(np.argmin(scores), (len(starts), cut.sequences - 1))
    middle, (left, right) = cut.first + 1 + int(place), starts[way]
    return Cut(cut.first, middle, left), Cut(middle, cut.stop, right)


def _half_scores(
    maths: CutMaths, cut: Cut, following: Cut | None, left_carries: bool, right_carries: bool
) -> FloatArray:
    """Cost and largest half of a cut before each sequence but the first; infinite where it is not allowed."""
    shared, new_before, weights, limits = maths.order.num_shared, maths.new_before, maths.weights, maths.limits
    at = shared[cut.first + 1 : cut.stop]
    new = new_before[cut.first + 1 : cut.stop]
    above = np.minimum.accumulate(at[::-1])[::-1]  # rows common to all from the place on, and the one before it
    first, carried = int(shared[cut.first]), int(shared[cut.first]) if left_carries else 0
    handed, read = at * right_carries, maths.read_next(following)
    places = np.arange(cut.first + 1, cut.stop)
    left_keys = maths.keys.of_each(cut.first, places, left_carries)
    right_keys = maths.keys.of_each(places, cut.stop, right_carries)

    left_keep = np.minimum(np.minimum.accumulate(at), carried) * right_carries
    left_rows = new - new_before[cut.first] + first - carried
    left_taken = left_rows + weights.carried * carried + weights.owed * (handed - left_keep)
    left_taken = left_taken + limits.copies.take_each(left_keys, left_rows)
    right_keep = np.minimum(above, read) * right_carries
    right_rows = new_before[cut.stop] - new + at - handed
    right_taken = right_rows + weights.carried * handed + weights.owed * (read - right_keep)
    right_taken = right_taken + limits.copies.take_each(right_keys, right_rows)

    largest = np.maximum(left_taken, right_taken)
    cost = first - carried + at - handed
    for exported in (carried - left_keep, handed - right_keep):
        cost = cost + maths.costs.export * (exported + maths.costs.part * (exported > 0))
    left_count = np.arange(1, cut.sequences)
    allowed = (left_rows > 0) & (right_rows > 0)
    most = np.inf if limits.max_rows is None else limits.max_rows
    halves = ((left_taken, left_rows, left_count), (right_taken, right_rows, cut.sequences - left_count))
    for taken, rows, count in halves:
        allowed &= (count == 1) | (taken <= most)
        cost = cost + LAST_RESORT * ((count == 1) & (taken - (1 - weights.recomputing) * rows > most))
    return np.where(allowed, cost + largest, np.inf)
