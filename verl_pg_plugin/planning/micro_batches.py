"""Cut a mini-batch into micro-batches that recompute as few shared tokens as the token budget allows.

A *group* is sequences that share their first token. Groups that fit stay whole and fill micro-batches, longest first.
Other groups become *split groups*: in sorted order they are cut into chunks, each as long as it fits together with the
prefix that it publishes for the next. Then the group's budget is lowered while the cost does not rise, which makes
chunks equally long.

The cost is minimal for responses to one prompt and for forwards alone; for updates of deeper trees with budgets above
1,000 tokens it is 0.5% above the minimum on average, at most 5%.
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
"""Fixed cost of a micro-batch in tokens of an update: gathering weights, launches, the head. On an H200 it takes 61 to
126 ms, a token 0.18 ms (Qwen3-8B config; benchmarks/data/actor_8b_carried_n64.csv, actor_8b_carried.csv)."""
PREFILL_COST = 0.25
"""Cost of a prefilled token in tokens of an update, which has a forward, its recomputation and a backward."""
SHORT_PREFIX = 64
"""Sequences do not form a group by a prefix of at most 1 / SHORT_PREFIX of the budget: each micro-batch computes it.
Otherwise a chat template that all prompts share would make the mini-batch one split group without room for others."""
MORE_TOKENS = (
    "raise ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu (a critic's: ppo_infer_max_token_len_per_gpu; "
    "SFT's: data.max_token_len_per_gpu)"
)


@dataclass(frozen=True)
class MicroBatchLimits:
    """Limits of a micro-batch; None for no limit."""

    max_tokens: int | None = None  # packed tokens: ``*_max_token_len_per_gpu`` with ``use_dynamic_bsz``
    max_sequences: int | None = None  # ``*_micro_batch_size_per_gpu`` without

    def budget(self, num_tokens: IntArray) -> int:
        """Return the token budget; without ``max_tokens``, the tokens of the longest ``max_sequences`` sequences."""
        longest = np.sort(num_tokens)[-(self.max_sequences or len(num_tokens)) :]
        return self.max_tokens or max(int(longest.sum()), 1)  # sequences of one token compute nothing


@dataclass(frozen=True)
class MicroBatch:
    """Whole groups that one forward computes, after a chunk of a split group if there is one."""

    sequences: list[int]  # indices into the mini-batch: the chunk's in sorted order, then the others
    num_tokens: int  # packed tokens that it computes, without its prefill
    chunk: Chunk | None = None  # position in the split group; None in an ordinary micro-batch


def cut_micro_batches(
    order: PrefixOrder,
    limits: MicroBatchLimits,
    weights: CacheWeights | None = None,
    at_least: int = 1,
    *,
    forward_only: bool = False,
    policy: ActivationPolicy = ActivationPolicy(),  # noqa: B008
) -> list[list[MicroBatch]]:
    """Partition the sequences of a mini-batch.

    Args:
        weights: weights of tokens that chunks read from each other; None with ``prefix_cache=off``.
        at_least: minimum number of micro-batches, which another rank needs; exact if fewer would do.
        forward_only: there is no backward, so no prefill.
        policy: decides which groups above ``max_tokens`` stay one micro-batch.

    Returns:
        The chunks of each split group in forward order, then lists of one micro-batch by descending tokens.

    Raises:
        ValueError: ``at_least`` exceeds the number of sequences, or a sequence exceeds ``max_tokens``.
    """
    if at_least > len(order.sequences):
        raise ValueError(
            f"{len(order.sequences)} sequences cannot fill {at_least} micro-batches, and all ranks must run as many. "
            f"Fix: spread sequences evenly over ranks, or {MORE_TOKENS}"
        )
    if limits.max_tokens is not None and (order.num_tokens > limits.max_tokens).any():
        longest = int(order.num_tokens.argmax())
        raise ValueError(
            f"sequence {int(order.sequences[longest])} alone needs {int(order.num_tokens[longest])} tokens of "
            f"computation, more than the {limits.max_tokens} a micro-batch may hold. Fix: {MORE_TOKENS}"
        )
    planner = _Planner(order, limits, weights, policy, 0.0 if forward_only else PREFILL_COST)
    planned = [planner.micro_batches(group) for group in planner.cut(at_least)]
    return sorted(planned, key=lambda group: (len(group) == 1, -max(part.num_tokens for part in group)))


def build_layouts(group: list[MicroBatch], sequences: Sequences, forward_only: bool) -> list[PackedLayout]:
    """Lay out the chunks of a split group, or one ordinary micro-batch, of a mini-batch's ``sequences``."""
    in_chunks = [s for part in group if part.chunk for s in part.sequences[: part.chunk.num_sequences]]
    first_label = int(sequences.prompt_lengths[in_chunks].min()) - 1 if in_chunks else 0
    selected = ((sequences.select(micro_batch.sequences), micro_batch.chunk) for micro_batch in group)
    return share_states([part.build_layout(chunk, first_label, forward_only) for part, chunk in selected])


class _Span(NamedTuple):
    """Sequences ``first <= k < stop`` of the sorted order: a whole group or a chunk."""

    first: int
    stop: int
    cached: int = 0  # leading tokens of the first sequence that are read from the cache
    read_next: int = 0  # tokens that the next chunk reads from the cache

    @property
    def size(self) -> int:
        return self.stop - self.first


_Part: TypeAlias = list[_Span]  # a micro-batch: a chunk of a split group if it has one, then whole groups


class _Planner:
    def __init__(
        self,
        order: PrefixOrder,
        limits: MicroBatchLimits,
        weights: CacheWeights | None,
        policy: ActivationPolicy,
        prefill_cost: float,
    ) -> None:
        self.order, self.policy, self.prefill_cost = order, policy, prefill_cost
        self.max_tokens = limits.budget(order.num_tokens)
        self.max_sequences = limits.max_sequences or math.inf
        self.weights = weights or CacheWeights()
        uses_cache = weights is not None
        self.short = self.max_tokens // SHORT_PREFIX if uses_cache or limits.max_tokens else 0
        # A prefix up to this length is recomputed, which costs less than its prefill.
        self.max_recomputed = prefill_cost * MICRO_BATCH_COST / (1 - prefill_cost) if uses_cache else math.inf
        # Lists, because indexing numpy scalars dominates the run time otherwise.
        self.shared, self.new = order.num_shared.tolist(), order.num_new.tolist()
        self.before = [0, *np.cumsum(order.num_new).tolist()]

    def tokens(self, span: _Span) -> int:
        """Packed tokens that a span computes."""
        return self.before[span.stop] - self.before[span.first] + self.shared[span.first] - span.cached

    def kept(self, span: _Span) -> int:
        """Leading tokens that a span and the next one both read from the cache."""
        most = min(span.cached, span.read_next)
        return min(most, min(self.shared[span.first + 1 : span.stop], default=most)) if most else 0

    def budget_use(self, span: _Span) -> float:
        """Part of the token budget that a span uses."""
        own = self.tokens(span)
        if not (span.cached or span.read_next):
            return own
        published = span.read_next - self.kept(span)
        forks = {*accumulate(self.shared[span.first + 1 : span.stop], min, initial=span.cached)} - {0}
        read = self.weights.read(span.cached, len(forks))
        return max(own, self.weights.computed * own + read + self.weights.hold(published))

    def cost(self, spans: list[_Span]) -> float:
        """Overhead of chunks in tokens of an update: recomputed tokens, prefills and fixed costs."""
        total = 0.0
        for span in spans:
            missing = span.cached - self.kept(span)
            prefill = self.prefill_cost * (missing + MICRO_BATCH_COST) if missing else 0.0
            total += MICRO_BATCH_COST + self.shared[span.first] - span.cached + prefill
        return total

    def fits(self, span: _Span) -> bool:
        return span.size <= self.max_sequences and self.budget_use(span) <= self.max_tokens

    def stays_whole(self, group: _Span) -> bool:
        if self.fits(group) or group.cached or group.read_next or group.size > self.max_sequences:
            return self.fits(group)
        longest = int(self.order.num_tokens[group.first : group.stop].max())
        shares_much = min(self.shared[group.first + 1 : group.stop], default=0) > self.short
        return shares_much and self.policy.keeps_whole(self.tokens(group), longest)

    def cut(self, at_least: int) -> list[list[_Part]]:
        """Cut all sequences into micro-batches, at least ``at_least`` of them.

        Returns a list of parts for each split group, in forward order, and a list of one part for every other
        micro-batch. If the budget needs fewer parts than ``at_least``, there are exactly that many.
        """
        chunks: list[list[_Span]] = []  # of each split group; of whole groups a list of one
        for group in self.groups():
            for span in [group] if self.stays_whole(group) else self.split(group):
                if span.cached:
                    chunks[-1].append(span)
                else:
                    chunks.append([span])
        groups = self.fill(chunks, at_least)
        if at_least > 1 and sum(map(len, groups)) > at_least:  # more micro-batches than needed: fill fewer
            groups = self.fill(chunks, 1)
        while sum(map(len, groups)) < at_least:
            self.add_one(groups)
        return groups

    def groups(self) -> list[_Span]:
        """Return groups of neighbours that share tokens; a short prefix joins them only within the limits."""
        groups: list[_Span] = []
        rest = [_Span(0, len(self.shared))]
        while rest:
            span = rest.pop()
            shared = self.order.num_shared[span.first + 1 : span.stop]
            least = min(shared.tolist(), default=math.inf)
            starts = span.first + 1 + np.flatnonzero(shared == least)
            # A short prefix may save enough, unless all sequences share it: then every micro-batch computes it.
            saves = least * len(starts) * SHORT_PREFIX > self.tokens(span) and span.size < len(self.shared)
            if least > self.short or (least and self.fits(span)) or saves:
                groups.append(span)
            else:
                rest += [_Span(*bounds) for bounds in pairwise([span.first, *starts.tolist(), span.stop])][::-1]
        return groups

    def split(self, group: _Span) -> list[_Span]:
        """Cut a group into chunks at the lowest budget that does not raise their cost."""
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
        """Cut a group into chunks that fit ``budget``, each as long as possible."""
        spans: list[_Span] = []
        first, cached = group.first, 0
        while first < group.stop:
            stop, read_next = self.end(_Span(first, group.stop, cached), budget, self.max_sequences)
            spans.append(_Span(first, stop, cached, read_next))
            first, cached = stop, read_next
        return spans

    def end(self, rest: _Span, budget: float, most: float) -> tuple[int, int]:
        """Return where the first chunk of ``rest`` stops, and how many cached tokens the next one reads."""
        shared, weights, first = self.shared, self.weights, rest.first
        before = self.before[first] - shared[first] + rest.cached
        common, num_states = rest.cached, 1  # common: cached tokens that all sequences of the chunk share
        good = furthest = 0, 0  # good: the next chunk reads its whole prefix, or recomputing it is cheaper
        for stop in range(first + 1, int(min(rest.stop, first + most)) + 1):
            own = self.before[stop] - before
            used = (weights.computed if furthest[0] else weights.alone) * own + weights.read(rest.cached, num_states)
            if max(own, used) > budget and furthest[0]:
                break
            if stop == rest.stop:
                return stop, 0
            prefix = shared[stop]
            reads = (
                prefix > self.max_recomputed
                and self.new[stop] > 0
                and used + weights.hold(max(prefix - common, 0)) <= budget
                and weights.alone * self.new[stop] + weights.read(prefix) <= budget  # the next one fits
            )
            furthest = stop, prefix if reads else 0
            if reads or prefix <= self.max_recomputed:
                good = furthest
            num_states += 0 < prefix < common
            common = min(common, prefix)
        return good if good[0] else furthest

    def fill(self, chunks: list[list[_Span]], at_least: int) -> list[list[_Part]]:
        """Add whole groups, longest first, to the micro-batch with the most room, or to a new one."""
        groups = [[[span] for span in spans] for spans in chunks if len(spans) > 1]
        whole = [spans[0] for spans in chunks if len(spans) == 1]
        weight = max(1.0, self.weights.computed)  # above 1 if the token budget exceeds device memory
        loose = sorted((-weight * self.tokens(span), span.first, span) for span in whole)
        parts = [part for group in groups for part in group]
        num_chunks = len(parts)
        tokens = sum(self.budget_use(chunk) for (chunk,) in parts)
        tokens += sum(min(-own, self.max_tokens) for own, _, _ in loose)
        wanted = max(at_least, math.ceil(tokens / self.max_tokens), math.ceil(len(self.new) / self.max_sequences))
        parts += [[] for _ in range(min(wanted - num_chunks, len(loose)))]

        def fullness(tokens: float, sequences: int, place: int) -> tuple[float, float, int, int]:
            return max(tokens / self.max_tokens, sequences / self.max_sequences), tokens, sequences, place

        emptiest = [fullness(sum(map(self.budget_use, p)), sum(s.size for s in p), k) for k, p in enumerate(parts)]
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
        """Make one more micro-batch by dividing the largest with several groups, else the largest."""
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
        # The last option always fits: one sequence alone, and the rest.
        alone = span.first + 1, min(span.cached, self.shared[span.first + 1])
        for end, cached in ((stop, read_next), (stop, 0), alone):
            left, right = span._replace(stop=end, read_next=cached), span._replace(first=end, cached=cached)
            if self.stays_whole(left) and self.stays_whole(right):
                break
        parts = [*group[:k], [left], [right], *group[k + 1 :]]
        groups[g : g + 1] = [parts] if cached else [parts[: k + 1], parts[k + 1 :]]

    def micro_batches(self, group: list[_Part]) -> list[MicroBatch]:
        """Convert the parts of a split group, or one ordinary micro-batch."""
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
