"""Assign sequences to ranks and mini-batches: as many to each, little computed twice, and all ranks done together.

A trainer's driver has no tokens at hand. It knows of each sequence its prompt (uid), its session, its place in the
session and two lengths, from which the prefix tree follows as far as rollouts build it:

- sessions of one prompt share the first sequence's prompt;
- a sequence whose prompt is at least as long as all of the one before it continues that one and shares all of it: one
  sequence per turn, tool output and all;
- a sequence with a shorter prompt was given an edited context, and shares with its session what its sessions share.

What is not seen is what different prompts begin with, and how much an edited context kept beyond its prompt. Each group
is counted with all of its prompt, which costs agents behind 2,000 common tokens 0.4% of an update, and GRPO nothing.

Each mini-batch of each rank is a bin. Whole groups go to bins, the most expensive first; then groups, and where that
leaves a rank behind their subtrees, change places between the most expensive bin and a cheap one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from verl_pg_plugin.layout.order import FloatArray, IntArray, PrefixOrder

SegmentPrice: TypeAlias = Callable[[IntArray, IntArray, IntArray], FloatArray]
"""Cost of each of S segments from (S,) tokens they share, (S,) tokens they add and (S,) of those that run the head."""

LEVEL = 1.01
"""No group is cut where the slowest is no more than this above the mean."""


@dataclass(frozen=True)
class Balance:
    """A new order of B sequences whose equal consecutive pieces are the ranks, and theirs the mini-batches."""

    order: IntArray  # (B,) index of the sequence at each place
    cost: FloatArray  # (num_ranks, num_mini_batches) deduplicated, in units of the price
    num_cut_groups: int  # that are in more than one bin
    num_tokens: int  # that all ranks compute, if the prefix order is right about what is shared

    @property
    def time(self) -> float:
        """Ranks wait for the slowest at the end of every mini-batch."""
        return float(self.cost.max(axis=0).sum())

    @property
    def slowest_over_mean(self) -> float:
        """Time over that of a perfect balance of the same work."""
        return self.time / float(self.cost.mean(axis=0).sum())


def order_by_sessions(
    group: IntArray, session: IntArray, place: IntArray, prompt_lengths: IntArray, response_lengths: IntArray
) -> PrefixOrder:
    """B sequences, group after group, in each the longest session first, in each session by place.

    Args:
        group: (B,) equal values mark sequences of one prompt; groups come in the order of their first sequence.
        session, place: (B,) equal values within a group mark one session, and a sequence's place in it.
        prompt_lengths, response_lengths: (B,) tokens.
    """
    lengths = prompt_lengths + response_lengths
    _, first_of_group, group = np.unique(group, return_index=True, return_inverse=True)
    rank_of_group = np.argsort(np.argsort(first_of_group, kind="stable"), kind="stable")[group]
    _, key = np.unique(np.stack([rank_of_group, session]), axis=1, return_inverse=True)
    longest = np.zeros(key.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(longest, key, lengths)
    order = np.lexsort((place, key, -longest[key], rank_of_group))

    prompts, lengths, key, in_group = (values[order] for values in (prompt_lengths, lengths, key, rank_of_group))
    opens_group = np.append(True, in_group[1:] != in_group[:-1])[: len(order)]
    continues = np.append(False, key[1:] == key[:-1])[: len(order)]
    extends = continues & np.append(False, prompts[1:] >= lengths[:-1])[: len(order)]
    common = np.minimum(prompts, prompts[opens_group][np.cumsum(opens_group) - 1])
    num_shared = np.where(extends, np.append(0, lengths[:-1])[: len(order)], common) - 1
    num_shared[opens_group] = 0
    return PrefixOrder(order, lengths - 1, np.minimum(num_shared, lengths - 1).clip(0))


def balance_groups(
    order: PrefixOrder,
    group: IntArray,
    response_lengths: IntArray,
    price: SegmentPrice,
    num_ranks: int,
    num_mini_batches: int = 1,
) -> Balance:
    """The same number of sequences in every bin, groups whole where that costs no time.

    A group is cut where it fits nowhere whole, and where that lets the slowest rank finish earlier although what the
    parts share is computed twice. ValueError where B is no multiple of ``num_ranks * num_mini_batches``.

    Args:
        order: what the B sequences share; the sequences of a group are neighbours in it.
        group: (B,) equal values mark sequences that belong together, in the caller's order.
        response_lengths: (B,) tokens, in the caller's order.
        num_mini_batches: optimizer steps that a rank's piece is divided into.
    """
    num_bins = num_ranks * num_mini_batches
    if len(group) % num_bins:
        raise ValueError(
            f"{len(group)} sequences do not divide into {num_ranks} ranks x {num_mini_batches} mini-batches"
        )
    none = np.zeros_like(order.num_shared)
    labels = np.minimum(response_lengths[order.sequences], order.num_new)
    new, again = price(order.num_shared, order.num_new, labels), price(none, order.num_shared, none)
    before = np.append(0.0, np.cumsum(new))
    ids = group[order.sequences]
    opens = np.append(True, ids[1:] != ids[:-1])
    in_group = np.cumsum(opens) - 1

    def costs(starts: IntArray) -> FloatArray:
        """Of spans that begin at ``starts``, each in a place of its own."""
        return again[starts] + np.diff(before[np.append(starts, len(group))])

    groups = np.flatnonzero(opens)
    inside = np.where(opens, np.iinfo(np.int64).max, order.num_shared)  # what a sequence shares within its group
    least = np.minimum.reduceat(inside, groups)  # what all of a group share
    shared = price(none[groups], np.where(least < inside.max(), least, 0), none[groups])
    bin_of = _assign(groups, costs(groups), len(group), num_bins)
    subtrees = opens | (inside == least[in_group])
    found: list[Balance] = []
    for exchanged, prefix in ((opens, np.zeros(len(groups))), (subtrees, shared)):
        spans = np.flatnonzero(exchanged | np.append(True, bin_of[1:] != bin_of[:-1]))
        own = costs(spans) - prefix[in_group[spans]]
        bin_of = _exchange(spans, own, in_group[spans], prefix, bin_of, num_bins)
        found.append(_balance(order, in_group, response_lengths, price, bin_of, num_ranks, num_mini_batches))
        if found[-1].slowest_over_mean <= LEVEL:
            break
    return min(found, key=lambda tried: tried.time)


def _assign(groups: IntArray, costs: FloatArray, size: int, num_bins: int) -> IntArray:
    """(B,) bin of each sequence: groups (their first places) by cost, what fits nowhere whole last, in parts."""
    bin_of = np.full(size, -1)
    room, load = np.full(num_bins, size // num_bins), np.zeros(num_bins)
    stops = np.append(groups[1:], size)
    for number in np.argsort(-costs, kind="stable"):
        first, stop = groups[number], stops[number]
        fits = room >= stop - first
        if fits.any():
            chosen = np.where(fits, load, np.inf).argmin()
            bin_of[first:stop] = chosen
            room[chosen] -= stop - first
            load[chosen] += costs[number]
    roomy = np.lexsort((load, -room))
    bin_of[bin_of < 0] = np.repeat(roomy, room[roomy])
    return bin_of


def _exchange(
    spans: IntArray, own: FloatArray, group: IntArray, prefix: FloatArray, bin_of: IntArray, num_bins: int
) -> IntArray:
    """(B,) bin of each sequence after spans (S,) of one size have changed places.

    The best exchange of the most expensive bin comes first, while both bins are cheaper afterwards than that one was.
    ``own`` (S,) is a span's cost without the ``prefix`` of its ``group`` (S,), which costs once in every bin.
    """
    sizes, of_span = np.diff(np.append(spans, len(bin_of))), bin_of[spans]

    def cost(held: IntArray) -> float:
        return float(own[held].sum() + prefix[np.unique(group[held])].sum())

    def exchanged(held: IntArray, leaves: int, enters: int) -> IntArray:
        return np.where(held == leaves, enters, held)

    members = [np.flatnonzero(of_span == number) for number in range(num_bins)]
    load = np.array([cost(held) for held in members])
    few = min(4, num_bins - 1)  # cheap bins are tried
    for _ in range(16 * num_bins):
        slowest = int(load.argmax())
        best, least = None, load[slowest] * (1 - 1e-9)
        for other in np.argpartition(load, few)[:few].tolist():
            if other == slowest:
                continue  # all bins cost the same
            half = (load[slowest] - load[other]) / 2
            for size in np.unique(sizes[members[slowest]]):
                mine, theirs = (held[sizes[held] == size] for held in (members[slowest], members[other]))
                if not len(theirs):
                    continue
                theirs = theirs[np.argsort(own[theirs], kind="stable")]
                near = np.searchsorted(own[theirs], own[mine] - half).clip(max=len(theirs) - 1)
                k = np.abs(own[mine] - own[theirs[near]] - half).argmin()
                leaves, enters = int(mine[k]), int(theirs[near[k]])
                after = exchanged(members[slowest], leaves, enters), exchanged(members[other], enters, leaves)
                if (higher := max(map(cost, after))) < least:
                    best, least = ((slowest, after[0]), (other, after[1])), higher
        if best is None:
            break
        for chosen, held in best:
            members[chosen], load[chosen] = held, cost(held)
    for number, held in enumerate(members):
        of_span[held] = number
    return np.repeat(of_span, sizes)


def _balance(
    order: PrefixOrder,
    in_group: IntArray,
    response_lengths: IntArray,
    price: SegmentPrice,
    bin_of: IntArray,
    num_ranks: int,
    num_mini_batches: int,
) -> Balance:
    """The bins of each rank by mini-batch: bins of like cost make one, and no rank has the most expensive of each."""
    places = np.argsort(bin_of, kind="stable").reshape(num_ranks * num_mini_batches, -1)
    costs, num_tokens = np.empty(len(places)), 0
    for number, together in enumerate(map(order.subset, places)):
        labels = np.minimum(response_lengths[together.sequences], together.num_new)
        costs[number] = price(together.num_shared, together.num_new, labels).sum()
        num_tokens += int(together.num_new.sum())
    sequences = order.sequences[places]  # groups lie together, for a critic whose mini-batches are smaller
    mini_batches = np.argsort(-costs, kind="stable").reshape(num_mini_batches, num_ranks)
    bins = np.empty((num_ranks, num_mini_batches), dtype=np.int64)
    totals = np.zeros(num_ranks)
    # In the order of their first sequences, so that no mini-batch is put off for being long.
    for number, row in enumerate(np.argsort(sequences.min(axis=1)[mini_batches].min(axis=1), kind="stable")):
        ranks = np.argsort(totals, kind="stable")  # the most expensive bin to the rank with least
        bins[ranks, number] = mini_batches[row]
        totals += costs[bins[:, number]]
    pairs = np.unique(np.stack([in_group, bin_of]), axis=1)
    return Balance(
        order=sequences[bins].ravel(),
        cost=costs[bins],
        num_cut_groups=int((np.bincount(pairs[0]) > 1).sum()),
        num_tokens=num_tokens,
    )
