"""Cut a mini-batch into micro-batches that compute what sequences share as rarely as the token budget lets.

A *group* is sequences that share their first token. One that fits stays whole, and whole groups fill micro-batches,
longest first. One that does not fit becomes a *split group*: in sorted order it is cut into chunks, each of which ends
at the furthest place where it fits beside the prefix that it publishes for the next. Then the budget of the group is
lowered while the chunks cost no more, so that they become of one size.

Where responses share one prompt, and in forwards alone, that costs as little as the cheapest cuts there are. An update
of trees with a budget above 1,000 tokens takes 0.5% more in the mean, and at most 5%.
"""

import heapq
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from verl_pg_plugin.layout import Chunk, IntArray, PackedLayout, PrefixOrder, Sequences, share_states
from verl_pg_plugin.planning.activation_policy import ActivationPolicy, CacheWeights

MICRO_BATCH_COST = 350.0
"""Fixed cost of a micro-batch in tokens of an update: gathered weights, launches, the head's own. On an H200 one takes
61 to 126 ms, a token 0.18 ms (Qwen3-8B config; benchmarks/data/actor_8b_carried_n64.csv, actor_8b_carried.csv)."""
PREFILL_COST = 0.25
"""A prefilled token in tokens of an update: one forward of a forward, its recomputation and a backward."""
SHORT_PREFIX = 64
"""A prefix of at most one in this many tokens of the budget binds no groups together: each micro-batch computes it.
What all prompts share, a chat template or a short system prompt, would make one split group of a whole mini-batch,
whose chunks wait for each other and have no room for other groups."""
MORE_TOKENS = (
    "raise ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu (a critic's: ppo_infer_max_token_len_per_gpu; "
    "SFT's: data.max_token_len_per_gpu)"
)


@dataclass(frozen=True)
class MicroBatchLimits:
    """What one micro-batch may hold; None for no limit."""

    max_tokens: int | None = None  # packed ones: ``*_max_token_len_per_gpu`` with ``use_dynamic_bsz``
    max_sequences: int | None = None  # ``*_micro_batch_size_per_gpu`` without

    def budget(self, num_tokens: IntArray) -> int:
        """Return the token budget; without one, that of as many of the longest of (B,) sequences as are allowed."""
        longest = np.sort(num_tokens)[-(self.max_sequences or len(num_tokens)) :]
        return self.max_tokens or max(int(longest.sum()), 1)  # sequences of one token compute nothing


@dataclass(frozen=True)
class MicroBatch:
    """What one forward computes: a chunk of a split group and whole groups that fill its room, or whole groups."""

    sequences: list[int]  # indices into the mini-batch: the chunk's in sorted order, then the others
    num_tokens: int  # packed ones that it computes, its prefill not counted
    chunk: Chunk | None = None  # place in the split group; None in an ordinary micro-batch


def cut_micro_batches(
    order: PrefixOrder,
    limits: MicroBatchLimits,
    weights: CacheWeights | None = None,
    at_least: int = 1,
    *,
    forward_only: bool = False,
    levels: ActivationPolicy = ActivationPolicy(),  # noqa: B008
) -> list[list[MicroBatch]]:
    """Partition the sequences of a mini-batch; ValueError where ``at_least`` exceeds them, or one exceeds the limits.

    Args:
        order: the B sequences and what they share.
        limits: of a micro-batch. Without ``max_tokens`` it has the room of as many of the longest sequences.
        weights: of tokens that chunks read from each other; None where nothing is read (``prefix_cache=off``).
        at_least: number of micro-batches that another rank needs.
        forward_only: there is no backward, so nothing is prefilled.
        levels: which groups above ``max_tokens`` stay one micro-batch all the same.

    Returns:
        Chunks of a split group in forward order, or one ordinary micro-batch, in every inner list; none is empty. Split
        groups come first, then those with most tokens. Where fewer than ``at_least`` would do, there are as many.
    """
    if at_least > len(order.sequences):
        raise ValueError(
            f"{len(order.sequences)} sequences cannot fill {at_least} micro-batches, of which all ranks must run as "
            f"many; spread sequences evenly over ranks, or {MORE_TOKENS}"
        )
    if limits.max_tokens is not None and (order.num_tokens > limits.max_tokens).any():
        longest = int(order.num_tokens.argmax())
        raise ValueError(
            f"sequence {int(order.sequences[longest])} alone needs {int(order.num_tokens[longest])} tokens of "
            f"computation, more than the {limits.max_tokens} a micro-batch may hold; {MORE_TOKENS}"
        )
    planner = _Planner(order, limits, weights, levels, 0.0 if forward_only else PREFILL_COST)
    planned = [planner.micro_batches(group) for group in planner.cut(at_least)]
    return sorted(planned, key=lambda group: (len(group) == 1, -max(part.num_tokens for part in group)))


def build_layouts(group: list[MicroBatch], sequences: Sequences, forward_only: bool) -> list[PackedLayout]:
    """The packed tokens of each chunk of a split group, in forward order, or of one ordinary micro-batch.

    ``sequences`` are those of the mini-batch.
    """
    of_split_group = [s for part in group if part.chunk for s in part.sequences[: part.chunk.num_sequences]]
    first_label = int(sequences.prompt_lengths[of_split_group].min()) - 1 if of_split_group else 0
    selected = ((sequences.select(micro_batch.sequences), micro_batch.chunk) for micro_batch in group)
    return share_states([part.build_layout(chunk, first_label, forward_only) for part, chunk in selected])


class _Span(NamedTuple):
    """Neighbours ``first <= k < stop`` of the sorted order. The first has ``cached`` tokens that are not computed; the
    chunk behind this one has ``read_next``.
    """

    first: int
    stop: int
    cached: int = 0
    read_next: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.first


_Part: TypeAlias = list[_Span]  # a micro-batch: whole groups, in front of them the chunk of a split group if it has one


class _Planner:
    def __init__(
        self,
        order: PrefixOrder,
        limits: MicroBatchLimits,
        weights: CacheWeights | None,
        levels: ActivationPolicy,
        prefill_cost: float,
    ) -> None:
        self.order, self.levels, self.prefill_cost = order, levels, prefill_cost
        self.max_tokens = limits.budget(order.num_tokens)
        self.max_sequences = limits.max_sequences or math.inf
        self.carries = weights is not None
        self.weights = weights or CacheWeights()
        self.short = self.max_tokens // SHORT_PREFIX if self.carries or limits.max_tokens else 0
        # Shorter prefixes are computed again: they cost less than their prefill.
        self.worth = prefill_cost * MICRO_BATCH_COST / (1 - prefill_cost) if self.carries else math.inf
        # Lists: scalars out of arrays take longer than what is done with them.
        self.shared, self.new = order.num_shared.tolist(), order.num_new.tolist()
        self.before = [0, *np.cumsum(order.num_new).tolist()]

    def tokens(self, span: _Span) -> int:
        """Packed tokens that a span computes."""
        return self.before[span.stop] - self.before[span.first] + self.shared[span.first] - span.cached

    def kept(self, span: _Span) -> int:
        """Leading tokens that a span and the next one both have cached."""
        most = min(span.cached, span.read_next)
        return min(most, min(self.shared[span.first + 1 : span.stop], default=most)) if most else 0

    def taken(self, span: _Span) -> float:
        """Of the token budget."""
        own = self.tokens(span)
        if not (span.cached or span.read_next):
            return own
        published = span.read_next - self.kept(span)
        parts_at = {*accumulate(self.shared[span.first + 1 : span.stop], min, initial=span.cached)} - {0}
        read = self.weights.read(span.cached, len(parts_at))
        return max(own, self.weights.computed * own + read + self.weights.hold(published))

    def cost(self, spans: list[_Span]) -> float:
        """What chunks take beyond the tokens that are computed once, in tokens of an update."""
        total = 0.0
        for span in spans:
            missing = span.cached - self.kept(span)
            prefill = self.prefill_cost * (missing + MICRO_BATCH_COST) if missing else 0.0
            total += MICRO_BATCH_COST + self.shared[span.first] - span.cached + prefill
        return total

    def fits(self, span: _Span) -> bool:
        return span.size <= self.max_sequences and self.taken(span) <= self.max_tokens

    def stays_whole(self, group: _Span) -> bool:
        if self.fits(group) or group.cached or group.read_next or group.size > self.max_sequences:
            return self.fits(group)
        longest = int(self.order.num_tokens[group.first : group.stop].max())
        shares_much = min(self.shared[group.first + 1 : group.stop], default=0) > self.short
        return shares_much and self.levels.keeps_whole(self.tokens(group), longest)

    def cut(self, at_least: int) -> list[list[_Part]]:
        """Split groups as lists of parts, in forward order, and lists of one part; at least so many parts."""
        chains: list[list[_Span]] = []
        for group in self.groups():
            for span in [group] if self.stays_whole(group) else self.split(group):
                if span.cached:
                    chains[-1].append(span)
                else:
                    chains.append([span])
        groups = self.fill(chains, at_least)
        if at_least > 1 and sum(map(len, groups)) > at_least:  # more bins than other ranks need, for they are fuller
            groups = self.fill(chains, 1)
        while sum(map(len, groups)) < at_least:
            self.add_one(groups)
        return groups

    def groups(self) -> list[_Span]:
        """Neighbours that share tokens; what exceeds the limits and shares no more than a short prefix is parted."""
        groups: list[_Span] = []
        rest = [_Span(0, len(self.shared))]
        while rest:
            span = rest.pop()
            inside = self.order.num_shared[span.first + 1 : span.stop]
            least = min(inside.tolist(), default=math.inf)
            starts = span.first + 1 + np.flatnonzero(inside == least)
            if least > self.short or (least and self.fits(span)) or self.pays(span, least * len(starts)):
                groups.append(span)
            else:
                rest += [_Span(*bounds) for bounds in pairwise([span.first, *starts.tolist(), span.stop])][::-1]
        return groups

    def pays(self, span: _Span, saved: float) -> bool:
        """Whether a short prefix saves so many tokens that it binds a group all the same.

        What all sequences share does not: every micro-batch computes it once, whatever it holds.
        """
        return saved * SHORT_PREFIX > self.tokens(span) and span.size < len(self.shared)

    def split(self, group: _Span) -> list[_Span]:
        """The chunks that walking finds, of one size where that costs no more."""
        spans = self.walk(group, self.max_tokens)
        cost = self.cost(spans)
        low, high = self.tokens(group) / len(spans), float(self.max_tokens)
        while high - low > 0.03 * high:
            middle = (low + high) / 2
            tighter = self.walk(group, middle)
            if (lower := self.cost(tighter)) <= cost * (1 + 1e-9):
                spans, cost, high = tighter, lower, middle
            else:
                low = middle
        return spans

    def walk(self, group: _Span, budget: float) -> list[_Span]:
        """Chunks that fit into ``budget``, each as long as it can be."""
        spans: list[_Span] = []
        first, cached = group.first, 0
        while first < group.stop:
            stop, read_next = self.end(_Span(first, group.stop, cached), budget, self.max_sequences)
            spans.append(_Span(first, stop, cached, read_next))
            first, cached = stop, read_next
        return spans

    def end(self, rest: _Span, budget: float, most: float) -> tuple[int, int]:
        """Where the chunk that starts with ``rest`` stops, and how many tokens the next one has cached."""
        shared, weights, first = self.shared, self.weights, rest.first
        before = self.before[first] - shared[first] + rest.cached
        common, num_states = rest.cached, 1  # what all sequences of the chunk share of the cached tokens
        good = furthest = 0, 0  # good: the next one reads what it shares, or shares too little
        for stop in range(first + 1, int(min(rest.stop, first + most)) + 1):
            own = self.before[stop] - before
            taken = (weights.computed if furthest[0] else weights.alone) * own + weights.read(rest.cached, num_states)
            if max(own, taken) > budget and furthest[0]:
                break
            if stop == rest.stop:
                return stop, 0
            prefix = shared[stop]
            reads = (
                prefix > self.worth
                and self.new[stop] > 0
                and taken + weights.hold(max(prefix - common, 0)) <= budget
                and weights.alone * self.new[stop] + weights.read(prefix) <= budget  # the next has room
            )
            furthest = stop, prefix if reads else 0
            if reads or prefix <= self.worth:
                good = furthest
            num_states += 0 < prefix < common
            common = min(common, prefix)
        return good if good[0] else furthest

    def fill(self, chains: list[list[_Span]], at_least: int) -> list[list[_Part]]:
        """Whole groups, longest first, to the micro-batch that has the most room, or to a new one."""
        groups = [[[span] for span in chain] for chain in chains if len(chain) > 1]
        spans = [chain[0] for chain in chains if len(chain) == 1]
        weight = max(1.0, self.weights.computed)  # above 1 where the device does not hold the token budget
        loose = sorted((-weight * self.tokens(span), span.first, span) for span in spans)
        parts = [part for group in groups for part in group]
        num_chunks = len(parts)
        tokens = sum(self.taken(span) for (span,) in parts) + sum(min(-own, self.max_tokens) for own, _, _ in loose)
        wanted = max(at_least, math.ceil(tokens / self.max_tokens), math.ceil(len(self.new) / self.max_sequences))
        parts += [[] for _ in range(min(wanted - num_chunks, len(loose)))]

        def fullness(tokens: float, sequences: int, place: int) -> tuple[float, float, int, int]:
            return max(tokens / self.max_tokens, sequences / self.max_sequences), tokens, sequences, place

        emptiest = [fullness(sum(map(self.taken, p)), sum(span.size for span in p), k) for k, p in enumerate(parts)]
        heapq.heapify(emptiest)
        for own, _, span in loose:
            _, load, size, place = emptiest[0]
            load, size = load - own, size + span.size
            if parts[place] and (load > self.max_tokens or size > self.max_sequences):
                place = len(parts)
                parts.append([])
                heapq.heappush(emptiest, fullness(-own, span.size, place))
            else:
                heapq.heapreplace(emptiest, fullness(load, size, place))
            parts[place].append(span)
        return groups + [[part] for part in parts[num_chunks:] if part]

    def add_one(self, groups: list[list[_Part]]) -> None:
        """Make one micro-batch more: of the largest that holds several groups, else of the largest."""
        _, _, g, k = max(
            (len(part) > 1, sum(map(self.tokens, part)), g, k)
            for g, group in enumerate(groups)
            for k, part in enumerate(group)
            if len(part) > 1 or part[0].size > 1
        )
        group, (span, *others) = groups[g], groups[g][k]
        if others:
            group[k] = [span]
            groups.append([others])
            return
        stop, read_next = self.end(span, self.max_tokens, (span.size + 1) // 2)
        # The last way is always there: a sequence by itself fits, and so does what it leaves.
        alone = span.first + 1, min(span.cached, self.shared[span.first + 1])
        for end, cached in ((stop, read_next), (stop, 0), alone):
            left, right = span._replace(stop=end, read_next=cached), span._replace(first=end, cached=cached)
            if self.stays_whole(left) and self.stays_whole(right):
                break
        chunks = [*group[:k], [left], [right], *group[k + 1 :]]
        groups[g : g + 1] = [chunks] if cached else [chunks[: k + 1], chunks[k + 1 :]]

    def micro_batches(self, group: list[_Part]) -> list[MicroBatch]:
        """What is told of a split group, or of one ordinary micro-batch."""
        if len(group) == 1:
            members = self.select(group[0])
            return [MicroBatch(members.sequences.tolist(), int(members.num_new.sum()))]
        planned = []
        for span, *whole in group:
            others = self.select(whole)
            chunk = Chunk(
                num_sequences=span.size, num_cached=span.cached, num_kept=self.kept(span), num_read_next=span.read_next
            )
            sequences = [*self.order.sequences[span.first : span.stop].tolist(), *others.sequences.tolist()]
            planned.append(MicroBatch(sequences, self.tokens(span) + int(others.num_new.sum()), chunk))
        return planned

    def select(self, spans: list[_Span]) -> PrefixOrder:
        places = [place for span in spans for place in range(span.first, span.stop)]
        return self.order.subset(np.array(sorted(places), dtype=np.int64))
