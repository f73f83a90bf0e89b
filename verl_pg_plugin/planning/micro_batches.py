"""Cut a mini-batch into micro-batches that compute what sequences share as rarely as the token budget lets.

A *group* is sequences that share their first token. One that fits stays whole, and whole groups fill micro-batches,
longest first. One that does not fit becomes a *split group*: in sorted order it is cut into chunks, each of which ends
at the furthest place where it fits beside the prefix that it publishes for the next. Then the budget of the group is
lowered while the chunks cost no more, so that they become of one size.

Where responses share one prompt that costs as little as the cheapest cuts there are, and up to 2.5% more in deep trees.
"""

import heapq
import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from verl_pg_plugin.layout import Chunk, IntArray, PrefixOrder
from verl_pg_plugin.planning.activation_level import WholeGroups

MICRO_BATCH_COST = 350.0
"""Fixed cost of a micro-batch in tokens of an update: gathered weights, launches, the LM head's own.

Measured on one H200, Qwen3-8B config, where a token takes 0.18 ms: the same tokens in 12 micro-batches more take 61 ms
each (docs/data/actor_8b_carried_n64.csv), in 7 more 126 ms each, 70 ms in another run (actor_8b_carried.csv).
"""
PREFILL_COST = 0.25
"""A prefilled token in tokens of an update: one forward of a forward, its recomputation and a backward.

In the same data a token of old_log_prob, LM head and entropy included, takes 0.26 of one of an update.
"""
SHORT_PREFIX = 64
"""A prefix of at most one in this many tokens of the budget binds no groups together: each micro-batch computes it.
What all prompts share, a chat template or a short system prompt, would make one split group of a whole mini-batch,
whose chunks wait for each other and have no room for other groups.
"""
SLACKS = (0.0, 0.1, 0.3)
"""How much shorter than the furthest a chunk may end where its sequences share less with the next."""


@dataclass(frozen=True)
class MicroBatchLimits:
    """What one micro-batch may hold; None for no limit.

    Attributes:
        max_tokens: packed tokens (``*_max_token_len_per_gpu`` with ``use_dynamic_bsz``).
        max_sequences: sequences (``*_micro_batch_size_per_gpu`` without).
    """

    max_tokens: int | None = None
    max_sequences: int | None = None


@dataclass(frozen=True)
class CacheWeights:
    """What a token that is not computed takes of the token budget, relative to a computed one.

    Attributes:
        cached: keys and values of a token that is read, and in training the sums of their gradients.
        published: what later chunks read of a token, or its pending gradients.
        recomputing: a computed token at the smallest activation level. A chunk of a single sequence, which cannot be
            cut, may run so.
    """

    cached: float = 0.0
    published: float = 0.0
    recomputing: float = 1.0

    def times(self, factor: float) -> "CacheWeights":
        """Of budgets that stand for so much less memory."""
        return CacheWeights(self.cached * factor, self.published * factor, min(self.recomputing * factor, 1.0))


@dataclass(frozen=True)
class MicroBatch:
    """What one forward computes: a chunk of a split group and whole groups that fill its room, or whole groups.

    Attributes:
        sequences: indices into the mini-batch: the chunk's in sorted order, then the others.
        num_tokens: packed tokens that it computes, its prefill not counted.
        chunk: place in the split group; None in an ordinary micro-batch.
    """

    sequences: list[int]
    num_tokens: int
    chunk: Chunk | None = None


def cut_micro_batches(
    order: PrefixOrder,
    limits: MicroBatchLimits,
    weights: CacheWeights | None = None,
    at_least: int = 1,
    *,
    forward_only: bool = False,
    micro_batch_cost: float = MICRO_BATCH_COST,
    whole: WholeGroups | None = None,
) -> list[list[MicroBatch]]:
    """Partition the sequences of a mini-batch.

    Args:
        order: the B sequences and what they share.
        limits: what a micro-batch may hold; cached and published tokens count by their weight. Without ``max_tokens`` a
            chunk has the room that as many of the longest sequences would take.
        weights: of tokens that chunks read from each other; None where nothing is read (``carry=never``): every
            micro-batch computes all that its sequences share.
        at_least: number of micro-batches that another rank needs.
        forward_only: there is no backward, so nothing is prefilled.
        micro_batch_cost: in tokens of an update.
        whole: groups above ``max_tokens`` that stay one micro-batch all the same.

    Returns:
        Chunks of a split group in forward order, or one ordinary micro-batch, in every inner list; none is empty. Split
        groups come first, then those with most tokens. Where fewer than ``at_least`` would do, there are as many.

    Raises:
        ValueError: a single sequence exceeds the limits, or ``at_least`` exceeds the number of sequences.
    """
    if at_least > len(order.sequences):
        raise ValueError(f"{len(order.sequences)} sequences cannot fill {at_least} micro-batches")
    if limits.max_tokens is not None and (order.num_tokens > limits.max_tokens).any():
        longest = int(order.num_tokens.argmax())
        raise ValueError(
            f"sequence {int(order.sequences[longest])} alone needs {int(order.num_tokens[longest])} tokens of "
            f"computation, more than the {limits.max_tokens} a micro-batch may hold; raise ppo_max_token_len_per_gpu "
            "and log_prob_max_token_len_per_gpu"
        )
    if weights is not None and limits.max_tokens is None and limits.max_sequences is not None:
        room = int(np.sort(order.num_tokens)[-limits.max_sequences :].sum())
        limits = replace(limits, max_tokens=room)
    planner = _Planner(order, limits, weights, 0.0 if forward_only else PREFILL_COST, micro_batch_cost, whole)
    groups = planner.cut(at_least)
    planned = [planner.micro_batches(group) for group in groups]
    return sorted(planned, key=lambda group: (len(group) == 1, -max(part.num_tokens for part in group)))


def tokens_of_stock(lengths: IntArray, limits: MicroBatchLimits) -> int:
    """Tokens of stock verl's largest micro-batch, at the least: it makes as few as the limits allow, and evens them.

    Args:
        lengths: (B,) of the sequences of the mini-batch.
        limits: of a micro-batch.
    """
    if limits.max_tokens is None:
        return int(np.sort(lengths)[-(limits.max_sequences or len(lengths)) :].sum())
    micro_batches = -(-lengths.sum() // limits.max_tokens)
    return int(max(lengths.max(), -(-lengths.sum() // micro_batches)))


def first_label(group: list[MicroBatch], prompt_lengths: IntArray) -> int:
    """Lowest position whose label lies in a response of any sequence of a split group.

    Args:
        group: its chunks.
        prompt_lengths: (B,) of all sequences of the mini-batch.
    """
    members = [s for part in group if part.chunk for s in part.sequences[: part.chunk.num_sequences]]
    return int(prompt_lengths[members].min()) - 1


def num_tokens(order: PrefixOrder, places: IntArray) -> int:
    """Packed tokens of the sequences at ``places`` of the sorted order, ascending."""
    if not len(places):
        return 0
    # Two sequences share what all neighbours between them share.
    shared = np.minimum.reduceat(order.num_shared[: places[-1] + 1], places[:-1] + 1) if len(places) > 1 else 0
    return int(order.num_tokens[places].sum() - np.sum(shared))


@dataclass(frozen=True)
class _Span:
    """Neighbours ``first <= k < stop`` of the sorted order; ``cached`` leading tokens of the first are not computed."""

    first: int
    stop: int
    cached: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.first


@dataclass
class _Part:
    """A micro-batch that is being filled: whole groups, in front of them the chunk of a split group if it is one."""

    spans: list[_Span] = field(default_factory=list)
    load: float = 0.0
    sequences: int = 0


class _Planner:
    """Counts tokens of spans, and cuts."""

    def __init__(
        self,
        order: PrefixOrder,
        limits: MicroBatchLimits,
        weights: CacheWeights | None,
        prefill_cost: float,
        micro_batch_cost: float,
        whole: WholeGroups | None,
    ) -> None:
        self.order = order
        self.max_tokens = math.inf if limits.max_tokens is None else limits.max_tokens
        self.max_sequences = math.inf if limits.max_sequences is None else limits.max_sequences
        self.whole = whole
        self.carries, self.weights = weights is not None, weights or CacheWeights()
        self.prefill_cost, self.micro_batch_cost = prefill_cost, micro_batch_cost
        # Shorter prefixes are computed again: they cost less than their prefill.
        self.worth = prefill_cost * micro_batch_cost / (1 - prefill_cost) if self.carries else math.inf
        # Lists: scalars out of arrays take longer than what is done with them.
        self.shared, self.new = order.num_shared.tolist(), order.num_new.tolist()
        self.before = [0, *np.cumsum(order.num_new).tolist()]

    def tokens(self, span: _Span) -> int:
        """Packed tokens that a span computes."""
        return self.before[span.stop] - self.before[span.first] + self.shared[span.first] - span.cached

    def kept(self, span: _Span, read_next: int) -> int:
        """Leading tokens that a span and the next one both have cached."""
        most = min(span.cached, read_next)
        return min(most, min(self.shared[span.first + 1 : span.stop], default=most)) if most else 0

    def taken(self, span: _Span, read_next: int = 0) -> float:
        """Of the token budget."""
        published = read_next - self.kept(span, read_next)
        return self.tokens(span) + self.weights.cached * span.cached + self.weights.published * published

    def cost(self, spans: list[_Span]) -> float:
        """What chunks take beyond the tokens that are computed once, in tokens of an update."""
        total = 0.0
        for span, read_next in _with_next(spans):
            missing = span.cached - self.kept(span, read_next)
            prefill = self.prefill_cost * (missing + self.micro_batch_cost) if missing else 0.0
            total += self.micro_batch_cost + self.shared[span.first] - span.cached + prefill
        return total

    def fits(self, span: _Span, read_next: int = 0) -> bool:
        return span.size <= self.max_sequences and self.taken(span, read_next) <= self.max_tokens

    def stays_whole(self, group: _Span) -> bool:
        if self.fits(group) or self.whole is None or group.size > self.max_sequences:
            return self.fits(group)
        shared, tokens = self.shared[group.first + 1 : group.stop], self.order.num_tokens[group.first : group.stop]
        return self.whole.keeps(self.tokens(group), min(shared), int(tokens.max()))

    def cut(self, at_least: int) -> list[list[_Part]]:
        """Split groups as lists of parts, in forward order, and lists of one part; at least so many parts."""
        loose: list[_Span] = []
        split: list[list[_Span]] = []
        for group in self.groups():
            spans = [group] if group.size == 1 or self.stays_whole(group) else self.split(group)
            for chain in _chains(spans):
                if len(chain) > 1:
                    split.append(chain)
                else:
                    loose += chain
        groups = self.fill(split, loose, at_least)
        if at_least > 1 and sum(map(len, groups)) > at_least:  # more bins than other ranks need, for they are fuller
            groups = self.fill(split, loose, 1)
        while sum(map(len, groups)) < at_least:
            self.add_one(groups)
        return groups

    def groups(self) -> list[_Span]:
        """Neighbours that share tokens; where they exceed the limits, those that share more than a short prefix."""
        shared = self.order.num_shared
        short = 0 if math.isinf(self.max_tokens) else self.max_tokens // SHORT_PREFIX
        groups: list[_Span] = []
        for first, stop in pairwise([*np.flatnonzero(shared == 0).tolist(), len(shared)]):
            starts: list[int] = []
            if stop - first > 1 and not self.fits(_Span(first, stop)):
                starts = (first + 1 + np.flatnonzero(shared[first + 1 : stop] <= short)).tolist()
            groups += [_Span(a, b) for a, b in pairwise([first, *starts, stop])]
        return groups

    def split(self, group: _Span) -> list[_Span]:
        """The cheapest chunks that walking finds, of one size where that costs no more."""
        inside = self.shared[group.first + 1 : group.stop]
        found: list[tuple[float, list[_Span]]] = []
        for slack in SLACKS if min(inside) < max(inside) else SLACKS[:1]:
            spans = self.walk(group, self.max_tokens, slack)
            cost = self.cost(spans)
            low, high = self.tokens(group) / len(spans), self.max_tokens
            while not math.isinf(high) and high - low > 0.03 * high:
                middle = (low + high) / 2
                tighter = self.walk(group, middle, slack)
                if (lower := self.cost(tighter)) <= cost * (1 + 1e-9):
                    spans, cost, high = tighter, lower, middle
                else:
                    low = middle
            found.append((cost, spans))
        return min(found, key=lambda one: one[0])[1]

    def walk(self, group: _Span, budget: float, slack: float) -> list[_Span]:
        """Chunks that fit into ``budget``, each as long as it can be, or shorter by ``slack`` of its tokens."""
        spans: list[_Span] = []
        first, cached = group.first, 0
        while first < group.stop:
            stop, read_next = self.end(_Span(first, group.stop, cached), budget, slack)
            spans.append(_Span(first, stop, cached))
            first, cached = stop, read_next
        return spans

    def end(self, rest: _Span, budget: float, slack: float) -> tuple[int, int]:
        """Where the chunk that starts with ``rest`` stops, and how many tokens the next one has cached."""
        shared, weights, first = self.shared, self.weights, rest.first
        fixed = weights.cached * rest.cached
        before = self.before[first] - self.shared[first] + rest.cached
        common = rest.cached  # what all sequences of the chunk share of the cached tokens
        ends: list[tuple[int, int, int]] = []  # stop, cached tokens of the next, own tokens
        alone: list[tuple[int, int, int]] = []  # the same where the next has none
        for stop in range(first + 1, int(min(rest.stop, first + self.max_sequences)) + 1):
            own = self.before[stop] - before
            taken = fixed + (own if stop > first + 1 else weights.recomputing * own)
            if taken > budget and alone:
                break
            alone.append((stop, 0, own))
            if stop == rest.stop:
                return stop, 0
            prefix = shared[stop]
            published = prefix - common if prefix > common else 0
            if prefix <= self.worth:
                ends.append((stop, 0, own))
            elif (
                self.new[stop]
                and taken + weights.published * published <= budget
                and weights.recomputing * self.new[stop] + weights.cached * prefix <= budget  # the next has room
            ):
                ends.append((stop, prefix, own))
            common = prefix - published
        ends = ends or alone
        enough = (1 - slack) * ends[-1][2]
        stop, read_next, _ = min((e for e in ends if e[2] >= enough), key=lambda e: (shared[e[0]], -e[0]))
        return stop, read_next

    def fill(self, split: list[list[_Span]], loose: list[_Span], at_least: int) -> list[list[_Part]]:
        """Whole groups, longest first, to the micro-batch that has the most room, or to a new one."""
        groups = [[_Part([span], self.taken(span, after), span.size) for span, after in _with_next(c)] for c in split]
        parts = [part for group in groups for part in group]
        num_chunks = len(parts)
        load = sum(part.load for part in parts) + sum(map(self.tokens, loose))
        sequences = sum(part.sequences for part in parts) + sum(span.size for span in loose)
        wanted = max(at_least, math.ceil(load / self.max_tokens), math.ceil(sequences / self.max_sequences))
        parts += [_Part() for _ in range(min(wanted - num_chunks, len(loose)))]
        emptiest = [(part.load, i) for i, part in enumerate(parts)]
        heapq.heapify(emptiest)
        for span in sorted(loose, key=lambda span: (-self.tokens(span), span.first)):
            crowded: list[tuple[float, int]] = []
            while emptiest and parts[emptiest[0][1]].sequences + span.size > self.max_sequences:
                crowded.append(heapq.heappop(emptiest))
            if not emptiest or emptiest[0][0] + self.tokens(span) > self.max_tokens:
                heapq.heappush(emptiest, (0.0, len(parts)))
                parts.append(_Part())
            load, i = emptiest[0]
            parts[i].spans.append(span)
            parts[i].sequences += span.size
            heapq.heapreplace(emptiest, (load + self.tokens(span), i))
            for one in crowded:
                if parts[one[1]].sequences < self.max_sequences:
                    heapq.heappush(emptiest, one)
        return groups + [[part] for part in parts[num_chunks:] if part.spans]

    def add_one(self, groups: list[list[_Part]]) -> None:
        """Make one micro-batch more, of the largest that can be divided within the limits."""
        by_tokens = [
            (-sum(map(self.tokens, part.spans)), g, k)
            for g, group in enumerate(groups)
            for k, part in enumerate(group)
            if len(part.spans) > 1 or part.spans[0].size > 1
        ]
        for _, g, k in sorted(by_tokens):
            group, spans = groups[g], groups[g][k].spans
            if len(spans) > 1:  # whole groups to each half; those beside a chunk leave it
                half = spans[1:] if len(group) > 1 else sorted(spans, key=self.tokens)[::2]
                groups[g][k] = _Part([span for span in spans if span not in half])
                groups.append([_Part(half)])
                return
            if halves := self.halve(spans[0], group[k + 1].spans[0].cached if k + 1 < len(group) else 0):
                left, right = (_Part([half]) for half in halves)
                if halves[1].cached:
                    groups[g] = [*group[:k], left, right, *group[k + 1 :]]
                else:
                    groups[g : g + 1] = [[*group[:k], left], [right, *group[k + 1 :]]]
                return
        # A sequence by itself always fits, and so does what it leaves.
        _, g, k = min(by_tokens)
        span = groups[g][k].spans[0]
        cached = min(span.cached, self.shared[span.first + 1])
        groups[g][k] = _Part([_Span(span.first + 1, span.stop, cached)])
        groups.append([_Part([_Span(span.first, span.first + 1)])])

    def halve(self, span: _Span, read_next: int) -> tuple[_Span, _Span] | None:
        """Two spans that fit, the second with a cached prefix or with one that it computes, whichever costs less."""
        places = np.arange(span.first + 1, span.stop)
        off_middle = np.abs(2 * places - span.first - span.stop)
        shared = self.order.num_shared[places]
        least = int(places[np.lexsort((off_middle, shared))[0]])
        ways = [(_Span(span.first, least, span.cached), _Span(least, span.stop))]
        adds = self.order.num_new[places] > 0
        if self.carries and adds.any():
            middle = int(places[np.where(adds, off_middle, np.inf).argmin()])
            ways.append((_Span(span.first, middle, span.cached), _Span(middle, span.stop, self.shared[middle])))
        ways = [(a, b) for a, b in ways if self.fits(a, b.cached) and self.fits(b, read_next)]
        return min(ways, key=lambda way: self.cost(list(way)), default=None)

    def micro_batches(self, group: list[_Part]) -> list[MicroBatch]:
        """What is told of a split group, or of one ordinary micro-batch."""
        if len(group) == 1:
            places = self.places(group[0].spans)
            return [MicroBatch(self.order.sequences[places].tolist(), num_tokens(self.order, places))]
        planned = []
        for part, (span, read_next) in zip(group, _with_next([part.spans[0] for part in group]), strict=True):
            others = self.places(part.spans[1:])
            chunk = Chunk(
                num_sequences=span.size,
                num_cached=span.cached,
                num_kept=self.kept(span, read_next),
                num_read_next=read_next,
            )
            planned.append(
                MicroBatch(
                    sequences=self.order.sequences[np.append(np.arange(span.first, span.stop), others)].tolist(),
                    num_tokens=self.tokens(span) + num_tokens(self.order, others),
                    chunk=chunk,
                )
            )
        return planned

    def places(self, spans: list[_Span]) -> IntArray:
        """All their places in the sorted order, ascending."""
        return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(s.first, s.stop) for s in spans)]))


def _with_next(spans: list[_Span]) -> list[tuple[_Span, int]]:
    """Each chunk with the number of tokens that the next one has cached."""
    return list(zip(spans, [*(span.cached for span in spans[1:]), 0], strict=True))


def _chains(spans: list[_Span]) -> list[list[_Span]]:
    """Chunks that go on in each other."""
    chains: list[list[_Span]] = []
    for span in spans:
        if span.cached:
            chains[-1].append(span)
        else:
            chains.append([span])
    return chains
