"""Cut a mini-batch into micro-batches in which a trie of any size computes its shared rows once."""

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verl_pg_plugin.batching.chain_cuts import (
    EXPORT_COST,
    PART_COST,
    CarryCosts,
    CarryWeights,
    Cut,
    CutMaths,
)
from verl_pg_plugin.batching.cut_search import cut_tries
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.batching.split_parts import split_further
from verl_pg_plugin.layout import PrefixOrder
from verl_pg_plugin.layout.carried import ChainPart
from verl_pg_plugin.layout.prefix_order import IntArray

SHORT_PREFIX = 64
"""A prefix of at most one in this many rows of a micro-batch binds no groups together: each micro-batch computes it
again. What all prompts share, a chat template or a short system prompt, would make one chain of a whole mini-batch, in
which parts wait for each other, none has room for other groups, and one short prompt decides for all where heads begin.
"""


@dataclass(frozen=True, kw_only=True)
class Part(ChainPart):
    """A micro-batch: neighbours of one trie that read rows of earlier parts, and whole groups that fill the room.

    Attributes:
        sequences: indices into the mini-batch: the chain's in sorted order, then the others.
        num_rows: rows that the micro-batch computes (without its export).
        chain: number of the chain; -1 in an ordinary micro-batch.
        recompute_attention: it is a single sequence and within the budget only if attention is not kept for its
            backward.
    """

    sequences: list[int]
    num_rows: int
    num_chain: int = 0
    chain: int = -1
    recompute_attention: bool = False


@dataclass(frozen=True)
class ChainPlan:
    """What was decided, and its figures.

    Attributes:
        chains: parts in forward order; an ordinary micro-batch is a chain of one. Chains of several parts come first,
            then micro-batches with most rows first.
        num_chains: those of several parts.
        carried_rows: sum of ``num_carried``.
        exported_rows: rows computed once more without gradient; 0 if the phase is forward-only.
        recomputed_rows: rows computed more than once otherwise, because carrying them would cost more.
    """

    chains: list[list[Part]]
    num_chains: int
    carried_rows: int
    exported_rows: int
    recomputed_rows: int

    @property
    def parts(self) -> list[Part]:
        """All micro-batches, in forward order."""
        return [part for chain in self.chains for part in chain]


def first_head(chain: list[Part], prompt_lengths: IntArray) -> int:
    """Lowest position whose label lies in a response of any sequence of the chain."""
    members = [s for part in chain for s in part.sequences[: part.num_chain]]
    return int(prompt_lengths[members].min()) - 1


def cut_with_chains(
    order: PrefixOrder,
    limits: MicroBatchLimits,
    weights: CarryWeights,
    at_least: int = 1,
    *,
    forward_only: bool = False,
    part_cost: float = PART_COST,
) -> ChainPlan:
    """Partition the sequences of a mini-batch; groups above the limits become chains where that is cheaper.

    A group that fits stays whole; a short prefix alone makes no group. One that does not fit is cut at the places that
    cost least (``cut_search``). What then belongs to no chain fills the room that parts have left, and
    ``cut_micro_batches`` spreads the rest.

    Args:
        order: the B sequences and what they share.
        limits: what a micro-batch may hold; carried and owed rows count by their weight.
        weights: memory of a carried row and of a handed-over one, in computed rows.
        at_least: number of micro-batches to make if more than the limits ask for (ranks must agree on one).
        forward_only: there is no backward, so nothing is exported.
        part_cost: fixed cost of a micro-batch in rows of an update.

    Raises:
        ValueError: a single sequence exceeds the limits, or ``at_least`` exceeds the number of sequences.
    """
    num_sequences = len(order.sequences)
    if at_least > num_sequences:
        raise ValueError(f"{num_sequences} sequences cannot fill {at_least} micro-batches")
    if limits.max_rows is not None and (order.num_rows > limits.max_rows).any():
        too_long = np.argmax(order.num_rows > limits.max_rows)
        cut_micro_batches(_select(order, np.array([too_long])), limits)  # says which one and what to do

    maths = CutMaths(order, limits, weights, CarryCosts(0.0 if forward_only else EXPORT_COST, part_cost))
    groups = _groups(maths)
    oversized = [(group.first, group.stop) for group in groups if not maths.admit_whole(group)]
    whole = [group for group in groups if maths.admit_whole(group)]
    cuts = [*whole, *(cut for cuts in cut_tries(maths, oversized) for cut in cuts)]
    cuts = split_further(maths, sorted(cuts, key=lambda cut: cut.first), at_least)

    runs: list[list[Cut]] = []
    for cut in cuts:
        if cut.carries:
            runs[-1].append(cut)
        else:
            runs.append([cut])
    chains = sorted((run for run in runs if len(run) > 1), key=lambda run: -max(map(maths.rows, run)))
    loose = [run[0] for run in runs if len(run) == 1]
    needed = max(at_least - sum(map(len, chains)), 0)
    fillers, rest = _fill(maths, chains, loose, needed)

    place = np.argsort(order.sequences)
    planned = []
    for number, chain in enumerate(chains):
        following = [*chain[1:], None]
        planned.append([_part(maths, number, *cut, fillers) for cut in zip(chain, following, strict=True)])
    if rest:
        for sequences in cut_micro_batches(_select(order, _places(rest)), limits, max(needed, 1)):
            rows = num_rows(order, np.sort(place[sequences]))
            planned.append([Part(sequences=sequences, num_rows=rows)])

    parts = [part for chain in planned for part in chain]
    return ChainPlan(
        chains=planned,
        num_chains=len(chains),
        carried_rows=sum(part.num_carried for part in parts),
        exported_rows=0 if forward_only else sum(part.num_carried - part.keep for part in parts),
        recomputed_rows=sum(part.num_rows for part in parts) - int(order.num_new.sum()),
    )


def _groups(maths: CutMaths) -> list[Cut]:
    """Neighbours that share rows; where they exceed the limits, those that share more than a short prefix."""
    shared, max_rows = maths.order.num_shared, maths.limits.max_rows
    short = 0 if max_rows is None else max_rows // SHORT_PREFIX
    groups: list[Cut] = []
    for first, stop in pairwise([*np.flatnonzero(shared == 0).tolist(), len(shared)]):
        group = Cut(first, stop, carries=False)
        if maths.admit_whole(group):
            groups.append(group)
        else:
            starts = first + 1 + np.flatnonzero(shared[first + 1 : stop] <= short)
            groups += [Cut(a, b, carries=False) for a, b in pairwise([first, *starts.tolist(), stop])]
    return groups


def _part(maths: CutMaths, number: int, cut: Cut, following: Cut | None, fillers: dict[Cut, list[Cut]]) -> Part:
    sequences, filled = maths.order.sequences[cut.first : cut.stop].tolist(), 0
    if cut in fillers:
        others = _places(fillers[cut])
        sequences += maths.order.sequences[others].tolist()
        filled = num_rows(maths.order, others)
    return Part(
        sequences=sequences,
        num_chain=cut.sequences,
        chain=number,
        num_rows=maths.rows(cut) + filled,
        num_carried=maths.carried(cut),
        keep=maths.keep(cut, following),
        read_next=maths.read_next(following),
        recompute_attention=maths.exceeds(cut, following),
    )


def _fill(
    maths: CutMaths, chains: list[list[Cut]], loose: list[Cut], needed: int
) -> tuple[dict[Cut, list[Cut]], list[Cut]]:
    """Put loose runs, largest first, where there is most room; what finds none, or is ``needed`` elsewhere, is left.

    Returns the runs that fill each part, and the rest.
    """
    limits, by_sequences = maths.limits, maths.limits.max_rows is None
    parts = [(cut, maths.taken(cut, after)) for run in chains for cut, after in zip(run, [*run[1:], None], strict=True)]
    loads = [(cut.sequences if by_sequences else taken, i) for i, (cut, taken) in enumerate(parts)]
    taken_of, count_of = [taken for _, taken in parts], [cut.sequences for cut, _ in parts]
    heapq.heapify(loads)
    fillers: dict[Cut, list[Cut]] = {}
    rest: list[Cut] = []
    largest_first = sorted(loose, key=lambda cut: (-maths.rows(cut), cut.first))
    for left, cut in zip(range(len(loose), 0, -1), largest_first, strict=True):
        rows = maths.taken(cut, None)
        if len(rest) + left > needed and loads:
            i = loads[0][1]
            taken, count = taken_of[i] + rows, count_of[i] + cut.sequences
            if (limits.max_rows is None or taken <= limits.max_rows) and (
                limits.max_sequences is None or count <= limits.max_sequences
            ):
                fillers.setdefault(parts[i][0], []).append(cut)
                taken_of[i], count_of[i] = taken, count
                heapq.heapreplace(loads, (count if by_sequences else taken, i))
                continue
        rest.append(cut)
    return fillers, rest


def _places(cuts: list[Cut]) -> IntArray:
    """All their places in the sorted order, ascending."""
    return np.concatenate([np.arange(cut.first, cut.stop) for cut in sorted(cuts, key=lambda cut: cut.first)])


def _select(order: PrefixOrder, places: IntArray) -> PrefixOrder:
    """Some of the sequences, by ascending place in the sorted order.

    Two sequences share the rows that all neighbours between them share.
    """
    shared = np.zeros(len(places), dtype=np.int64)
    if len(places) > 1:
        shared[1:] = np.minimum.reduceat(order.num_shared[: places[-1] + 1], places[:-1] + 1)
    return PrefixOrder(order.sequences[places], order.num_rows[places], shared)


def num_rows(order: PrefixOrder, places: IntArray) -> int:
    """Rows of the sequences at ``places`` of the sorted order, ascending."""
    return int(_select(order, places).num_new.sum())
