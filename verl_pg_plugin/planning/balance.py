"""Assign sequences to ranks and mini-batches with equal counts, equal costs and few split groups.

The trainer's driver has no tokens. It has each sequence's prompt (uid), session, place in the session and two lengths.
They determine the prefix tree as far as rollouts build it:

- sessions of one prompt share the first sequence's prompt;
- a sequence whose prompt is no shorter than the whole sequence before it continues that one and shares all of it;
- a sequence with a shorter prompt has an edited context, and shares what sessions of its prompt share.

Prefixes that different prompts share, and unchanged parts of an edited context, are unknown. For agents with 2,000
common tokens this costs 0.4% of an update, for GRPO nothing.

Each mini-batch of each rank is a bin. Whole groups are assigned to bins, the most expensive first. Then groups are
exchanged between the most expensive bin and cheap ones, and subtrees of groups if that does not balance the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from verl_pg_plugin.layout.order import FloatArray, IntArray, PrefixOrder

SegmentPrice: TypeAlias = Callable[[IntArray, IntArray, IntArray], FloatArray]
"""Cost (S,) of segments from (S,) shared tokens, (S,) new tokens and (S,) tokens that run the head."""

LEVEL = 1.01
"""No group is cut if the slowest rank takes at most this times the mean."""


@dataclass(frozen=True)
class Balance:
    """A new order of B sequences: equal consecutive parts for the ranks, each divided into mini-batches."""

    order: IntArray  # (B,) index of the sequence at each place
    cost: FloatArray  # (num_ranks, num_mini_batches) deduplicated, in units of the price
    num_cut_groups: int  # groups in more than one bin
    num_tokens: int  # tokens that all ranks compute, according to the prefix order

    @property
    def time(self) -> float:
        """Sum over mini-batches of the slowest rank's cost."""
        return float(self.cost.max(axis=0).sum())

    @property
    def slowest_over_mean(self) -> float:
        """``time`` over that of perfectly balanced ranks; 1 if there is nothing to compute."""
        mean = float(self.cost.mean(axis=0).sum())
        return self.time / mean if mean else 1.0


def order_by_sessions(
    group: IntArray, session: IntArray, place: IntArray, prompt_lengths: IntArray, response_lengths: IntArray
) -> PrefixOrder:
    """Return the prefix order of B sequences, as far as their lengths determine it (see the module docstring).

    Groups are in the order of their first sequences, sessions of a group by descending length of their longest
    sequence, and sequences of a session by ``place``.

    Args:
        group, session: (B,) numbers; those of sessions are unique within a group.
        place: (B,) position in the session.
        prompt_lengths, response_lengths: (B,) in tokens.
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
    """Put the same number of sequences into every bin, and cut only groups that fit no bin or delay the slowest rank.

    ``group`` (B,) and ``response_lengths`` (B,) are in the caller's order; sequences of a group are neighbours in
    ``order``. ValueError if B is not a multiple of ``num_ranks * num_mini_batches``.
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
        """Cost of each span that begins at ``starts``, computed separately."""
        return again[starts] + np.diff(before[np.append(starts, len(group))])

    groups = np.flatnonzero(opens)
    shared_in_group = np.where(opens, np.iinfo(np.int64).max, order.num_shared)
    common = np.minimum.reduceat(shared_in_group, groups)  # tokens that all sequences of a group share
    prefix_cost = price(none[groups], np.where(common < shared_in_group.max(), common, 0), none[groups])
    bin_of = _assign(groups, costs(groups), len(group), num_bins)
    subtrees = opens | (shared_in_group == common[in_group])
    candidates: list[Balance] = []
    for exchanged, prefix in ((opens, np.zeros(len(groups))), (subtrees, prefix_cost)):
        spans = np.flatnonzero(exchanged | np.append(True, bin_of[1:] != bin_of[:-1]))
        own = costs(spans) - prefix[in_group[spans]]
        bin_of = _exchange(spans, own, in_group[spans], prefix, bin_of, num_bins)
        candidates.append(_balance(order, in_group, response_lengths, price, bin_of, num_ranks, num_mini_batches))
        if candidates[-1].slowest_over_mean <= LEVEL:
            break
    return min(candidates, key=lambda balance: balance.time)


def _assign(groups: IntArray, costs: FloatArray, size: int, num_bins: int) -> IntArray:
    """Return the bin of each sequence (B,): whole groups by descending cost, then in parts those that fit no bin."""
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
    """Exchange spans of equal size between bins, and return the bin of each sequence (B,).

    The best exchange of the most expensive bin is taken while both bins then cost less than it did.
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
    """Assign bins to ranks and mini-batches: bins of similar cost form a mini-batch, and rank totals are balanced."""
    places = np.argsort(bin_of, kind="stable").reshape(num_ranks * num_mini_batches, -1)
    costs, num_tokens = np.empty(len(places)), 0
    for number, together in enumerate(map(order.subset, places)):
        labels = np.minimum(response_lengths[together.sequences], together.num_new)
        costs[number] = price(together.num_shared, together.num_new, labels).sum()
        num_tokens += int(together.num_new.sum())
    sequences = order.sequences[places]  # groups stay together, for a critic whose mini-batches are smaller
    mini_batches = np.argsort(-costs, kind="stable").reshape(num_mini_batches, num_ranks)
    bins = np.empty((num_ranks, num_mini_batches), dtype=np.int64)
    totals = np.zeros(num_ranks)
    # Mini-batches run in the order of their first sequences, so long ones are not delayed.
    for number, row in enumerate(np.argsort(sequences.min(axis=1)[mini_batches].min(axis=1), kind="stable")):
        ranks = np.argsort(totals, kind="stable")  # the most expensive bin goes to the rank with the lowest total
        bins[ranks, number] = mini_batches[row]
        totals += costs[bins[:, number]]
    pairs = np.unique(np.stack([in_group, bin_of]), axis=1)
    return Balance(
        order=sequences[bins].ravel(),
        cost=costs[bins],
        num_cut_groups=int((np.bincount(pairs[0]) > 1).sum()),
        num_tokens=num_tokens,
    )
