"""The tokens of one packed forward: every shared prefix once, no padding.

For a GRPO group with prompt p_0 .. p_{P-1} and responses r^i the packed tokens are

    [p_0 .. p_{P-2}] [p_{P-1} r^1_0 .. r^1_{R_1-2}] [p_{P-1} r^2_0 .. r^2_{R_2-2}] ...

one segment for the shared prefix and one for each response. In general segments form a tree, and a segment's queries
attend to the tokens of its ancestors followed by its own. A segment ends only where sequences part: of turns that
continue one another, each a sequence of its own, the longest is one segment.

A tree that exceeds a micro-batch is a *split group*, cut in sorted order into *chunks* of neighbouring sequences. Each
is a forward of its own and computes the tokens that no earlier chunk has. What else it reads is a prefix of its first
sequence, the *cached* tokens

    chunk 1   [p_0 .. p_{P-2}] [p_{P-1} r^1_0 ..] [p_{P-1} r^2_0 ..]
    chunk 2   cached: keys     [p_{P-1} r^3_0 ..] [p_{P-1} r^4_0 ..]

whose keys and values lie in a prefix cache, by their position. The split group's sequences sort first in their chunk,
so token, position and place in the cache are one number, and of the index maps only queries drop out.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from verl_pg_plugin.layout.order import IntArray, PrefixOrder, build_prefix_order


def _empty() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Where a micro-batch stands in its split group."""

    num_sequences: int  # of the split group, in sorted order; others stand behind them
    num_cached: int = 0  # leading tokens of the first one that earlier chunks compute
    num_kept: int = 0  # how many of those the next chunk reads as well
    num_read_next: int = 0  # leading tokens of the last one that the next chunk has cached; 0 for the last chunk


@dataclass(frozen=True)
class PackedLayout:
    """Index maps of a packed forward over B sequences; numpy integers, host memory.

    Shape legend: T packed tokens, c cached tokens, S segments, K keys, N tokens that run the LM head, M response
    tokens. Tokens of a segment are consecutive and segments are ordered by their first token. A token's *logical* index
    is its place in the sequences laid one after the other, as verl's jagged tensors hold them.

    Attributes:
        input_ids: (T,) id of each packed token.
        token_index: (T,) its logical index in one of the sequences that contain it.
        position_ids: (T,) its position, as the model's rotary embedding takes it; (P, T) where those have P dimensions.
        labels: (T,) the token it predicts.
        segment_parent: (S,) segment that a segment continues, which comes first; -1 for none, or where it is cached.
        segment_start: (S,) position of a segment's first token = tokens of all its ancestors, cached ones included.
        cu_seqlens_q: (S+1,) segment s owns tokens ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]``.
        cu_seqlens_k: (S+1,) its keys and values are ``kv_index[cu_seqlens_k[s]:cu_seqlens_k[s + 1]]``.
        kv_index: (K,) index into [c cached | T packed] tokens: a segment's ancestors, then its own, for every segment.
        head_index: (N,) packed tokens whose label lies in a response, ascending.
        response_index: (M,) logical index of the token in front of each response token, where verl reads it.
        response_head: (M,) index into [C ``cached_heads`` | N ``head_index``] of that token.
        num_sequences: B.
        num_total_tokens: tokens that computing every sequence alone without padding would run.
        num_cached: c; the tokens at positions 0 .. c-1 of the split group's path that earlier chunks compute.
        cached_heads: (C,) positions of cached tokens whose LM head outputs this chunk's responses read, ascending.
        publish: (H,) packed tokens that later chunks read, at positions ``publish_start .. publish_start + H``.
        publish_start: tokens of the cache that are still valid below the published ones.
        published_states: positions, ascending, at which later chunks go on from a recurrent state of this chunk.
        num_states: of such positions behind cached tokens.
        prefill: tokens of the path that must be computed without gradient before this chunk; None where all are cached.
    """

    input_ids: IntArray
    token_index: IntArray
    position_ids: IntArray
    labels: IntArray
    segment_parent: IntArray
    segment_start: IntArray
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    kv_index: IntArray
    head_index: IntArray
    response_index: IntArray
    response_head: IntArray
    num_sequences: int
    num_total_tokens: int
    num_cached: int = 0
    cached_heads: IntArray = field(default_factory=_empty)
    publish: IntArray = field(default_factory=_empty)
    publish_start: int = 0
    published_states: IntArray = field(default_factory=_empty)
    num_states: int = 0
    prefill: "PackedLayout | None" = None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def is_chunk(self) -> bool:
        """Whether tokens of another micro-batch are read, or its own by another."""
        return self.num_cached > 0 or len(self.publish) > 0

    @property
    def shares_tokens(self) -> bool:
        """Whether a token belongs to more than one sequence: alone, a sequence of L tokens has L - 1."""
        return self.is_chunk or self.num_tokens < self.num_total_tokens - self.num_sequences

    @property
    def reads_ancestors(self) -> bool:
        """Whether attention reads tokens of other segments."""
        return len(self.kv_index) > self.num_tokens

    @property
    def segments(self) -> tuple[IntArray, IntArray]:
        """(S,) tokens that each segment sees before its own, and (S,) its own."""
        return self.segment_start, np.diff(self.cu_seqlens_q)

    @property
    def num_cached_keys(self) -> IntArray:
        """(S,) keys of each segment that are cached, which come first."""
        return np.add.reduceat(self.kv_index < self.num_cached, self.cu_seqlens_k[:-1], dtype=np.int64)

    @property
    def resumed_at(self) -> IntArray:
        """Positions, ascending, at which segments go on behind cached tokens."""
        return np.unique(self.segment_start[(self.segment_parent < 0) & (self.segment_start > 0)])

    @property
    def cache_use(self) -> dict[str, int]:
        """Tokens and states that are read from the cache, and those that gather gradients from their readers."""
        pending = {"pending": len(self.publish), "pending_states": len(self.published_states)}
        return {"cached": self.num_cached, "states": self.num_states, **pending}


def build_packed_layout(
    tokens: IntArray,
    offsets: IntArray,
    prompt_lengths: IntArray,
    classes: IntArray | None = None,
    inside: IntArray | None = None,
    chunk: Chunk | None = None,
    first_label: int = 0,
    forward_only: bool = True,
    *,
    keys: IntArray | None = None,
    positions: IntArray | None = None,
) -> PackedLayout:
    """Lay out sequences so that each shared token exists once, without the queries of tokens that are cached.

    Args:
        tokens: (N,) ids of prompt + response of every sequence, one after the other; any integer dtype.
        offsets: (B+1,) sequence s is ``tokens[offsets[s]:offsets[s + 1]]``. One of a single token is left out.
        prompt_lengths: (B,) leading tokens that are the prompt, at least 1.
        classes: (B,) optional; sequences of different class never share a token.
        inside: (N,) optional, of images, see ``build_prefix_order``.
        chunk: of a split group, whose sequences come first, in the order of ``PrefixOrder``; others share none of it.
        first_label: lowest position whose label lies in a response of any sequence of the split group. Tokens published
            from there on run the LM head even where they are prompt here, because they may be a label elsewhere.
        forward_only: the cache is filled by earlier chunks and nothing is prefilled.
        keys: (N,) optional; what is compared in place of the ids, which are equal where these are.
        positions: (P, N) optional, as the model takes them; else they count from 0 in every sequence.

    Raises:
        ValueError: an empty prompt, token ids outside of 0 .. 2**32 - 1, or the numbers describe no chunk.
    """
    lengths = np.diff(offsets)
    if (prompt_lengths < 1).any():
        raise ValueError(f"sequence {int(np.argmin(prompt_lengths))} has an empty prompt")

    chunk = chunk or Chunk(num_sequences=0)
    if chunk.num_sequences:
        own_class = np.zeros_like(lengths) if classes is None else classes - classes.min()
        classes = np.where(np.arange(len(lengths)) < chunk.num_sequences, 0, 1 + own_class)
    order = build_prefix_order(tokens if keys is None else keys, offsets, classes, inside)
    first_token = np.cumsum(order.num_new) - order.num_new
    num_tokens = int(order.num_new.sum())
    paths = _paths(order, first_token)
    publish = paths[chunk.num_sequences - 1][chunk.num_kept : chunk.num_read_next].astype(np.int64)
    c, num_published = chunk.num_cached, max(chunk.num_read_next - chunk.num_kept, 0)
    if len(publish) != num_published or (publish < c).any() or num_tokens <= c:
        raise ValueError(
            f"{chunk} is no chunk of these {num_tokens} tokens: its sequences must be neighbours in sorted order and "
            "compute at least one token"
        )

    position = np.arange(num_tokens) - np.repeat(first_token - order.num_shared, order.num_new)
    token_index = (position + np.repeat(offsets[order.sequences], order.num_new))[c:]
    tail, start, parent, last_tail = _segments(order)
    bounds = np.append(first_token[tail] + start - order.num_shared[tail], num_tokens)
    num_queries = np.diff(np.maximum(bounds - c, 0))
    alive = num_queries > 0
    # Cached tokens come first, so a parent without queries has number -1.
    parent = np.where(parent >= 0, (np.cumsum(alive) - 1)[parent], -1)[alive]
    num_queries, num_keys = num_queries[alive], (start + np.diff(bounds))[alive]
    kv_index = [paths[tail][:end] for tail, end in zip(last_tail[alive].tolist(), num_keys.tolist(), strict=True)]

    prompts = prompt_lengths[order.sequences]
    response_tokens = np.concatenate([path[p - 1 :] for path, p in zip(paths, prompts.tolist(), strict=True)])
    num_responses = order.num_tokens - prompts + 1
    response_start = offsets[order.sequences] + prompts - 1
    response_index = np.repeat(response_start + num_responses - np.cumsum(num_responses), num_responses)
    response_index += np.arange(len(response_tokens))
    needs_head = np.zeros(num_tokens, dtype=bool)
    needs_head[response_tokens] = True
    needs_head[publish[max(first_label - chunk.num_kept, 0) :]] = True
    head_of_token = np.cumsum(needs_head, dtype=np.int32) - 1
    head_index = c + np.flatnonzero(needs_head[c:])
    needs_prefill = not forward_only and c > chunk.num_kept

    return PackedLayout(
        input_ids=tokens[token_index],
        token_index=token_index,
        position_ids=position[c:] if positions is None else positions[:, token_index],
        labels=tokens[token_index + 1],
        segment_parent=parent,
        segment_start=num_keys - num_queries,
        cu_seqlens_q=np.append(0, np.cumsum(num_queries)),
        cu_seqlens_k=np.append(0, np.cumsum(num_keys)),
        kv_index=np.concatenate(kv_index),
        head_index=head_index - c,
        response_index=response_index,
        response_head=head_of_token[response_tokens],
        num_sequences=len(lengths),
        num_total_tokens=int(lengths.sum()),
        num_cached=c,
        cached_heads=np.flatnonzero(needs_head[:c]),
        publish=publish - c,
        publish_start=chunk.num_kept,
        prefill=build_prefill(tokens, offsets, positions, chunk.num_kept, c, first_label) if needs_prefill else None,
    )


def share_states(layouts: list[PackedLayout]) -> list[PackedLayout]:
    """The chunks of a split group, in forward order, each told where later ones go on behind what it publishes."""
    published: list[set[int]] = [set() for _ in layouts]
    owners: list[IntArray] = []  # of each chunk, which one in front of it has published each token of the cache
    owner = _empty()
    for number, layout in enumerate(layouts):
        owners.append(owner)
        prefilled = () if layout.prefill is None else layout.prefill.resumed_at.tolist()
        for position in {*layout.resumed_at.tolist(), *prefilled}:
            published[owner[position - 1]].add(position)
        owner = np.append(owner[: layout.publish_start], np.full(len(layout.publish), number))
    positions, told = sorted(set().union(*published)), []
    for layout, owner, own in zip(layouts, owners, published, strict=True):
        behind = [p for p in positions if p <= layout.num_cached and p in published[owner[p - 1]]]
        prefill = layout.prefill
        if prefill is not None:
            of_prefill = np.array([p for p in behind if p > prefill.publish_start], dtype=np.int64)
            prefill = replace(prefill, published_states=of_prefill)
        states = np.array(sorted(own), dtype=np.int64)
        told.append(replace(layout, published_states=states, num_states=len(behind), prefill=prefill))
    return told


def build_prefill(
    tokens: IntArray, offsets: IntArray, positions: IntArray | None, start: int, stop: int, first_label: int
) -> PackedLayout:
    """Tokens ``start .. stop`` of the first sequence; those before them are cached."""
    path = slice(offsets[0], offsets[0] + stop + 1)  # and the label of its last token
    chunk = Chunk(num_sequences=1, num_cached=start, num_kept=start, num_read_next=stop)
    layout = build_packed_layout(
        tokens[path],
        np.array([0, stop + 1]),
        np.array([1]),
        chunk=chunk,
        positions=None if positions is None else positions[:, path],
    )
    return replace(
        layout,
        head_index=np.arange(max(first_label - start, 0), stop - start),
        response_index=_empty(),  # its LM head outputs are read from the cache, not from verl's jagged tensor
        response_head=_empty(),
        cached_heads=_empty(),
        num_total_tokens=int(offsets[1] - offsets[0]),
    )


def _paths(order: PrefixOrder, first_token: IntArray) -> list[IntArray]:
    """Packed tokens of every sequence in sorted order: those shared with the one before, then its own *tail*."""
    paths: list[IntArray] = []
    for shared, first, new in zip(order.num_shared.tolist(), first_token.tolist(), order.num_new.tolist(), strict=True):
        tail = np.arange(first, first + new, dtype=np.int32)
        paths.append(np.concatenate([paths[-1][:shared], tail]) if shared else tail)
    return paths


def _segments(order: PrefixOrder) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut each tail where later sequences branch off, and join it to one that alone goes on where it ends.

    Returns of every segment, ordered by first token, the tail it begins in, its start, its parent, the tail it ends in.
    """
    owner = _branch_owner(order.num_shared)
    branches = np.flatnonzero(owner >= 0)
    cut_tail, cut_start = owner[branches], order.num_shared[branches]
    inside = cut_start < order.num_tokens[cut_tail]
    tails = np.flatnonzero(order.num_new > 0)

    # One number for each start in a tail: their order is that of segments, and of what ends in front of a start.
    stride = int(order.num_tokens.max()) + 1
    keys = np.unique(
        np.concatenate([tails * stride + order.num_shared[tails], (cut_tail * stride + cut_start)[inside]])
    )
    tail, start = keys // stride, keys % stride
    parent = np.arange(len(keys)) - 1
    first = start == order.num_shared[tail]
    # A tail's first segment continues the segment of its owner's tail that ends where it branches off.
    parent[first] = np.searchsorted(keys, owner[tail[first]] * stride + start[first]) - 1
    # An only child's tokens follow its parent's, and whoever reads the child reads both.
    joined = (parent >= 0) & (np.bincount(parent + 1, minlength=len(keys) + 1)[parent + 1] == 1)
    begins = np.flatnonzero(~joined)
    number = np.cumsum(~joined) - 1
    parents = parent[begins]
    last = tail[np.append(begins[1:], len(keys)) - 1]
    return tail[begins], start[begins], np.where(parents >= 0, number[parents], -1), last


def _branch_owner(num_shared: IntArray) -> IntArray:
    """The earlier sequence whose tail holds the last token that a sequence shares, -1 where it shares none: the nearest
    which itself shares fewer tokens."""
    owner = np.full(len(num_shared), -1, dtype=np.int64)
    stack: list[int] = []
    shared = num_shared.tolist()
    for k, tokens in enumerate(shared):
        while stack and shared[stack[-1]] >= tokens:
            stack.pop()
        if tokens:
            owner[k] = stack[-1]
        stack.append(k)
    return owner
