"""In which order each rank runs its micro-batches, where ranks wait for each other at every one of them."""

from collections.abc import Sequence
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]

LEAST_GAIN = 1e-6
"""Of the time of all: an order that gains less is not taken, whatever its last bits say."""


def align(ranks: Sequence[Sequence[FloatArray]]) -> list[list[int]]:
    """Orders in which expensive micro-batches meet expensive ones.

    Ranks gather weights together in every layer, so the k-th micro-batches of all ranks take as long as the most
    expensive of them. Each rank begins with its most expensive group; two groups of one rank at a time then change
    places while that shortens the sum over the most expensive. Returned are, for each rank, indices of its groups.

    Args:
        ranks: of each rank, its split groups: (n, C) costs of a group's n chunks in running order, in each of C phases
            that end before the next begins. An ordinary micro-batch is a group of one chunk. All ranks have as many.
    """
    orders = [np.argsort([-group.sum(axis=1).mean() for group in groups], kind="stable").tolist() for groups in ranks]
    if all(len(group) == 1 for groups in ranks for group in groups):
        return orders  # nothing is shorter than the order by cost
    # (ranks, N, C) costs of all chunks as they run.
    costs = np.stack([np.concatenate([groups[i] for i in order]) for groups, order in zip(ranks, orders, strict=True)])
    tries, improved = 0, len(ranks) > 1
    while improved:
        improved = False
        for rank, groups in enumerate(ranks):
            others = np.delete(costs, rank, axis=0).max(axis=0)
            shortest = np.maximum(others, costs[rank]).sum() * (1 - LEAST_GAIN)
            for a, b in combinations(range(len(groups)), 2):
                order = list(orders[rank])
                order[a], order[b] = order[b], order[a]
                tried = np.concatenate([groups[i] for i in order])
                time = np.maximum(others, tried).sum()
                if time < shortest:
                    orders[rank], costs[rank], shortest = order, tried, time * (1 - LEAST_GAIN)
                    improved = True
                tries += 1
                if tries >= 3000:  # so that this takes no longer with more ranks and groups
                    return orders
    return orders
