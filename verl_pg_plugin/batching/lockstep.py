"""In which order each rank runs its chains, where ranks wait for each other at every micro-batch."""

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import numpy as np

from verl_pg_plugin.batching.runs import FloatArray

MOST_TRIES = 3000
"""Orders that are looked at; the time that this takes does not grow beyond it with ranks and chains."""
LEAST_GAIN = 1e-6
"""Of the time of all: an order that gains less is not taken, whatever its last bits say."""


def align(ranks: Sequence[Sequence[FloatArray]]) -> list[list[int]]:
    """Orders in which dear micro-batches meet dear ones.

    Ranks gather weights together in every layer, so the k-th micro-batches of all ranks take as long as the dearest of
    them. Chains of like cost meet where every rank runs the dearest first; from there chains of one rank at a time are
    exchanged or moved while that shortens the sum over the dearest.

    Args:
        ranks: of each rank, its chains: (n, C) costs of a chain's n parts in the order in which they run, in each of C
            phases that end before the next begins. All ranks have as many parts.

    Returns:
        For each rank the indices of its chains, in the order in which they run.
    """
    orders = list(map(_by_cost, ranks))
    if max((len(chain) for chains in ranks for chain in chains), default=1) == 1:
        return orders  # nothing is shorter than the order by cost
    costs = np.stack([_laid_out(chains, order) for chains, order in zip(ranks, orders, strict=True)])
    tries, improved = 0, len(ranks) > 1
    while improved and tries < MOST_TRIES:
        improved = False
        for rank, chains in enumerate(ranks):
            others = np.delete(costs, rank, axis=0).max(axis=0)
            shortest = np.maximum(others, costs[rank]).sum() * (1 - LEAST_GAIN)
            for order in _changes(orders[rank]):
                tried = _laid_out(chains, order)
                time = np.maximum(others, tried).sum()
                tries += 1
                if time < shortest:
                    orders[rank], costs[rank], shortest = order, tried, time * (1 - LEAST_GAIN)
                    improved = True
                if tries >= MOST_TRIES:
                    return orders
    return orders


def _by_cost(chains: Sequence[FloatArray]) -> list[int]:
    order: list[int] = np.argsort([-chain.sum(axis=1).mean() for chain in chains], kind="stable").tolist()
    return order


def _laid_out(chains: Sequence[FloatArray], order: Sequence[int]) -> FloatArray:
    """(N, C) costs of all parts as they run."""
    return np.concatenate([chains[i] for i in order])


def _changes(order: Sequence[int]) -> Iterator[list[int]]:
    """Two chains exchanged, or one moved; all from the order that was given."""
    for a, b in combinations(range(len(order)), 2):
        changed = list(order)
        changed[a], changed[b] = changed[b], changed[a]
        yield changed
    for a, b in permutations(range(len(order)), 2):
        if abs(a - b) > 1:
            changed = list(order)
            changed.insert(b, changed.pop(a))
            yield changed
