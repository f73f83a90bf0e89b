"""Layout of a packed forward: every shared prefix once, no padding.

For a GRPO group with prompt p_0 .. p_{P-1} and responses r^i the packed tokens are

    [p_0 .. p_{P-2}] [p_{P-1} r^1_0 .. r^1_{R_1-2}] [p_{P-1} r^2_0 .. r^2_{R_2-2}] ...

one segment for the shared prefix and one for each response. In general segments form a tree: a segment's queries attend
to the tokens of its ancestors and then to its own. A segment ends only where sequences fork, so turns that continue one
another are one segment.

A tree that exceeds the token budget is a *split group*, cut in sorted order into *chunks* of neighbouring sequences.
Each chunk is one forward and computes the tokens that no earlier chunk does. It reads a prefix of its first sequence,
the *cached* tokens, from a prefix cache:

    chunk 1   [p_0 .. p_{P-2}] [p_{P-1} r^1_0 ..] [p_{P-1} r^2_0 ..]
    chunk 2   cached: keys     [p_{P-1} r^3_0 ..] [p_{P-1} r^4_0 ..]

The split group's sequences sort first in their chunk, so a cached token's index is its position.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from verl_pg_plugin.layout.order import IntArray, PrefixOrder, build_prefix_order


def _empty() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Position of a micro-batch in its split group."""

    num_sequences: int  # sequences of the split group, in sorted order; others follow
    num_cached: int = 0  # leading tokens of the first sequence that earlier chunks compute
    num_kept: int = 0  # cached tokens that the next chunk reads as well
    num_read_next: int = 0  # leading tokens of the last sequence that the next chunk reads; 0 for the last chunk


@dataclass(frozen=True)
class PackedLayout:
    """Index arrays of a packed forward over B sequences; numpy integers in host memory.

    Shapes: T packed tokens, c cached tokens, S segments, K keys, N tokens that run the LM head, M response tokens. A
    segment's tokens are consecutive, and segments are ordered by their first token. A token's *logical* index is its
    index in the concatenated sequences, as in verl's jagged tensors.

    Attributes:
        input_ids: (T,) id of each packed token.
        token_index: (T,) its logical index in one of the sequences that contain it.
        position_ids: (T,) its position for the rotary embedding; (P, T) for an embedding of P dimensions.
        labels: (T,) the token it predicts.
        segment_parent: (S,) segment that a segment continues, an earlier one; -1 for a root or a cached parent.
        segment_start: (S,) position of a segment's first token: the number of tokens of its ancestors, cached or not.
        cu_seqlens_q: (S+1,) segment s owns tokens ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]``.
        cu_seqlens_k: (S+1,) its keys and values are ``kv_index[cu_seqlens_k[s]:cu_seqlens_k[s + 1]]``.
        kv_index: (K,) index into [c cached | T packed] tokens: for every segment, its ancestors' tokens, then its own.
        head_index: (N,) packed tokens whose label is a response token, ascending.
        response_index: (M,) logical index of the token before each response token, where verl reads it.
        response_head: (M,) index of that token in [C ``cached_heads`` | N ``head_index``].
        num_sequences: B.
        num_total_tokens: tokens of all sequences, unshared and without padding.
        num_cached: c; the tokens at positions 0 .. c-1 of the split group's path that earlier chunks compute.
        cached_heads: (C,) positions of cached tokens whose LM head outputs this chunk's responses read, ascending.
        publish: (H,) packed tokens that later chunks read, at positions ``publish_start .. publish_start + H``.
        publish_start: cached tokens before the published ones that stay valid.
        published_states: positions, ascending, where later chunks continue from a recurrent state of this chunk.
        num_states: number of positions with a cached recurrent state.
        prefill: tokens of the path to compute without gradient before this chunk; None if all are cached.
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
        """True if this forward reads tokens of another one or publishes tokens to others."""
        return self.num_cached > 0 or len(self.publish) > 0

    @property
    def shares_tokens(self) -> bool:
        """True if some token belongs to several sequences; an unshared sequence of L tokens computes L - 1."""
        return self.is_chunk or self.num_tokens < self.num_total_tokens - self.num_sequences

    @property
    def reads_ancestors(self) -> bool:
        """True if attention crosses segments."""
        return len(self.kv_index) > self.num_tokens

    @property
    def segments(self) -> tuple[IntArray, IntArray]:
        """(S,) earlier tokens and (S,) own tokens of each segment."""
        return self.segment_start, np.diff(self.cu_seqlens_q)

    @property
    def num_cached_keys(self) -> IntArray:
        """(S,) number of cached keys of each segment; they come first."""
        return np.add.reduceat(self.kv_index < self.num_cached, self.cu_seqlens_k[:-1], dtype=np.int64)

    @property
    def resumed_at(self) -> IntArray:
        """Positions, ascending, where segments continue cached tokens."""
        return np.unique(self.segment_start[(self.segment_parent < 0) & (self.segment_start > 0)])

    @property
    def cache_use(self) -> dict[str, int]:
        """Cached tokens and states, and those with pending gradients; see ``TokenBytes.cache_bytes``."""
        pending = {"pending": len(self.publish), "pending_states": len(self.published_states)}
        return {"cached": self.num_cached, "states": self.num_states, **pending}


def build_packed_layout(
    tokens: IntArray,
    offsets: IntArray,
    prompt_lengths: IntArray,
    classes: IntArray | None = None,
    offset_in_image: IntArray | None = None,
    chunk: Chunk | None = None,
    first_label: int = 0,
    forward_only: bool = True,
    *,
    keys: IntArray | None = None,
    positions: IntArray | None = None,
) -> PackedLayout:
    """Lay out sequences with each shared token once; cached tokens have keys but no queries.

    Args:
        tokens: (N,) ids of prompt + response of every sequence, concatenated; any integer dtype.
        offsets: (B+1,) sequence s is ``tokens[offsets[s]:offsets[s + 1]]``. A sequence of one token computes nothing.
        prompt_lengths: (B,) prompt tokens of each sequence, at least 1.
        classes: (B,) optional; sequences of different classes never share a token.
        offset_in_image: (N,) optional; see ``build_prefix_order``.
        chunk: chunk of a split group; its sequences come first, in sorted order, and share nothing with others.
        first_label: lowest position whose label is a response token of any sequence of the split group. Published
            tokens from there on run the LM head even if they are prompt here, because other chunks may read them.
        forward_only: earlier chunks fill the cache, so there is no prefill.
        keys: (N,) optional; compared instead of the ids. Equal keys imply equal ids.
        positions: (P, N) optional, as the model takes them; by default they count from 0 in every sequence.

    Raises:
        ValueError: a prompt is empty, a token id is not in [0, 2**32), or ``chunk`` does not match the sequences.
    """
    lengths = np.diff(offsets)
    if (prompt_lengths < 1).any():
        raise ValueError(f"sequence {int(np.argmin(prompt_lengths))} has an empty prompt")

    chunk = chunk or Chunk(num_sequences=0)
    if chunk.num_sequences:
        own_class = np.zeros_like(lengths) if classes is None else classes - classes.min()
        classes = np.where(np.arange(len(lengths)) < chunk.num_sequences, 0, 1 + own_class)
    order = build_prefix_order(tokens if keys is None else keys, offsets, classes, offset_in_image)
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
    # Cached tokens come first, so a parent without queries gets index -1.
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
    """Set the positions of published and cached recurrent states in the chunks of a split group, in forward order."""
    published: list[set[int]] = [set() for _ in layouts]
    owners: list[IntArray] = []  # for each chunk, the earlier chunk that published each token of the cache
    owner = _empty()
    for number, layout in enumerate(layouts):
        owners.append(owner)
        prefilled = () if layout.prefill is None else layout.prefill.resumed_at.tolist()
        for position in {*layout.resumed_at.tolist(), *prefilled}:
            published[owner[position - 1]].add(position)
        owner = np.append(owner[: layout.publish_start], np.full(len(layout.publish), number))
    positions, chunks = sorted(set().union(*published)), []
    for layout, owner, own in zip(layouts, owners, published, strict=True):
        cached = [p for p in positions if p <= layout.num_cached and p in published[owner[p - 1]]]
        prefill = layout.prefill
        if prefill is not None:
            of_prefill = np.array([p for p in cached if p > prefill.publish_start], dtype=np.int64)
            prefill = replace(prefill, published_states=of_prefill)
        states = np.array(sorted(own), dtype=np.int64)
        chunks.append(replace(layout, published_states=states, num_states=len(cached), prefill=prefill))
    return chunks


def build_prefill(
    tokens: IntArray, offsets: IntArray, positions: IntArray | None, start: int, stop: int, first_label: int
) -> PackedLayout:
    """Lay out tokens ``start .. stop`` of the first sequence after ``start`` cached ones."""
    path = slice(offsets[0], offsets[0] + stop + 1)  # with the label of the last token
    chunk = Chunk(num_sequences=1, num_cached=start, num_kept=start, num_read_next=stop)
    positions = None if positions is None else positions[:, path]
    layout = build_packed_layout(tokens[path], np.array([0, stop + 1]), np.array([1]), chunk=chunk, positions=positions)
    return replace(
        layout,
        head_index=np.arange(max(first_label - start, 0), stop - start),
        response_index=_empty(),  # its head outputs are read from the cache, not by verl
        response_head=_empty(),
        cached_heads=_empty(),
        num_total_tokens=int(offsets[1] - offsets[0]),
    )


def _paths(order: PrefixOrder, first_token: IntArray) -> list[IntArray]:
    """Packed tokens of every sequence in sorted order: those shared with the one before it, then its *tail*."""
    paths: list[IntArray] = []
    for shared, first, new in zip(order.num_shared.tolist(), first_token.tolist(), order.num_new.tolist(), strict=True):
        tail = np.arange(first, first + new, dtype=np.int32)
        paths.append(np.concatenate([paths[-1][:shared], tail]) if shared else tail)
    return paths


def _segments(order: PrefixOrder) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut each tail into segments where later sequences fork, and join a segment to its only child.

    Returns:
        For every segment, ordered by first token: the tail it begins in, its start, its parent, the tail it ends in.
    """
    owner = _branch_owner(order.num_shared)
    branches = np.flatnonzero(owner >= 0)
    cut_tail, cut_start = owner[branches], order.num_shared[branches]
    cuts = cut_start < order.num_tokens[cut_tail]  # not at the tail's end
    tails = np.flatnonzero(order.num_new > 0)

    # One integer for each (tail, start), which sorts like the segments.
    stride = int(order.num_tokens.max()) + 1
    keys = np.concatenate([tails * stride + order.num_shared[tails], (cut_tail * stride + cut_start)[cuts]])
    keys = np.unique(keys)
    tail, start = keys // stride, keys % stride
    parent = np.arange(len(keys)) - 1
    first = start == order.num_shared[tail]
    # The parent of a tail's first segment is the segment that ends at the fork in the owner's tail.
    parent[first] = np.searchsorted(keys, owner[tail[first]] * stride + start[first]) - 1
    # An only child's tokens follow its parent's.
    joined = (parent >= 0) & (np.bincount(parent + 1, minlength=len(keys) + 1)[parent + 1] == 1)
    begins, parents = np.flatnonzero(~joined), parent[~joined]
    number = np.cumsum(~joined) - 1
    last = tail[np.append(begins[1:], len(keys)) - 1]
    return tail[begins], start[begins], np.where(parents >= 0, number[parents], -1), last


def _branch_owner(num_shared: IntArray) -> IntArray:
    """For each sequence, the nearest earlier one that shares fewer tokens: its tail has the fork. -1 if none."""
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
