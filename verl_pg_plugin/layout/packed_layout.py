"""The rows of one packed forward: every shared prefix once, no padding.

For a GRPO group with prompt p_0 .. p_{P-1} and responses r^i the rows are

    [p_0 .. p_{P-2}] [p_{P-1} r^1_0 .. r^1_{R_1-2}] [p_{P-1} r^2_0 .. r^2_{R_2-2}] ...

that is, one segment for the shared prefix and one for each response. In general the segments form a trie: each
has a chain of ancestors, and its queries attend to the rows of those ancestors followed by its own. A segment ends only
where sequences part: of turns that continue one another, each a sequence of its own, the longest is one segment.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verl_pg_plugin.layout.prefix_order import IntArray, PrefixOrder, build_prefix_order

if TYPE_CHECKING:
    from verl_pg_plugin.layout.carried import CarriedLayout


@dataclass(frozen=True)
class PackedLayout:
    """Index maps of a packed forward over B sequences; numpy integers, host memory.

    Shape legend: T rows, S segments, K key/value rows, N rows that need the head, M response tokens. Rows of a
    segment are consecutive and segments are ordered by their first row, so queries need no gather. A token's
    *logical* index is its place in the sequences laid one after the other, as verl's jagged tensors hold them.

    Attributes:
        input_ids: (T,) token of each row.
        token_index: (T,) logical index of that token in one of the sequences that contain it.
        position_ids: (T,) its position in every sequence that contains it, as the model's rotary embedding takes it;
            (P, T) where positions have P dimensions.
        key_place: (T,) its place among the keys of every segment that reads it.
        labels: (T,) the token each row predicts.
        segment_parent: (S,) segment that a segment continues; -1 for a root. Parents come first.
        segment_start: (S,) position of a segment's first row = rows of all its ancestors.
        cu_seqlens_q: (S+1,) segment s owns rows ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]``.
        cu_seqlens_k: (S+1,) its keys and values are ``kv_rows[cu_seqlens_k[s]:cu_seqlens_k[s + 1]]``.
        kv_rows: (K,) rows of a segment's ancestors, then its own, for every segment.
        head_rows: (N,) rows whose label lies in a response, ascending.
        response_index: (M,) logical index of the row in front of each response token, where verl reads it.
        response_head: (M,) index into ``head_rows`` of that row.
        head_sequence: (N,) a sequence that contains the head row.
        num_sequences: B.
        num_logical_tokens: tokens that computing every sequence alone without padding would run.
    """

    input_ids: IntArray
    token_index: IntArray
    position_ids: IntArray
    key_place: IntArray
    labels: IntArray
    segment_parent: IntArray
    segment_start: IntArray
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    kv_rows: IntArray
    head_rows: IntArray
    response_index: IntArray
    response_head: IntArray
    head_sequence: IntArray
    num_sequences: int
    num_logical_tokens: int

    @property
    def num_rows(self) -> int:
        """Physical tokens: rows the model computes."""
        return len(self.input_ids)

    @property
    def num_roots(self) -> int:
        """Groups: sets of sequences that share at least their first row."""
        return int((self.segment_parent < 0).sum())

    @property
    def shares_rows(self) -> bool:
        """Whether a row belongs to more than one sequence; plain rmpad has ``L - 1`` rows for each of L tokens."""
        return self.num_rows < self.num_logical_tokens - self.num_sequences

    @property
    def num_copied_keys(self) -> int:
        """Keys, each with its value, that attention copies: all K where a row is a key of several segments, else 0."""
        return len(self.kv_rows) if len(self.kv_rows) > self.num_rows else 0

    @property
    def max_seqlen_q(self) -> int:
        return int(np.diff(self.cu_seqlens_q).max())

    @property
    def max_seqlen_k(self) -> int:
        return int(np.diff(self.cu_seqlens_k).max())

    @property
    def reads_ancestors(self) -> bool:
        """Whether attention reads rows beside those of a row's own segment."""
        return len(self.kv_rows) > self.num_rows

    @property
    def stands_alone(self) -> bool:
        """No row of another micro-batch is read, see ``layout.carried``."""
        return True

    @property
    def export(self) -> "CarriedLayout | None":
        """Nothing, see ``layout.carried``."""
        return None

    @property
    def segments(self) -> tuple[IntArray, IntArray]:
        """(S,) rows that each segment sees before its own, and (S,) its own."""
        return self.segment_start, np.diff(self.cu_seqlens_q)


def build_packed_layout(
    tokens: IntArray,
    offsets: IntArray,
    prompt_lengths: IntArray,
    classes: IntArray | None = None,
    inside: IntArray | None = None,
) -> PackedLayout:
    """Lay out sequences so that each shared row exists once.

    Args:
        tokens: (N,) token ids of prompt + response of every sequence, one after the other.
        offsets: (B+1,) sequence s is ``tokens[offsets[s]:offsets[s + 1]]``.
        prompt_lengths: (B,) leading tokens that are the prompt; at least 1 and at least one token is left.
        classes: (B,) optional; sequences of different class never share a row.
        inside: (N,) optional, see ``build_prefix_order``.

    Raises:
        ValueError: an empty prompt or response, or token ids out of range.
    """
    lengths = np.diff(offsets)
    if (prompt_lengths < 1).any():
        raise ValueError(f"sequence {int(np.argmax(prompt_lengths < 1))} has an empty prompt")
    if (prompt_lengths >= lengths).any():
        raise ValueError(f"sequence {int(np.argmax(prompt_lengths >= lengths))} has an empty response")

    order = build_prefix_order(tokens, offsets, classes, inside)
    first_row = _exclusive_cumsum(order.num_new)
    num_rows = int(order.num_new.sum())
    paths = _paths(order, first_row)
    segment_tail, segment_start, segment_parent, last_tail = _segments(order)

    # Rows of a tail are consecutive tokens of its sequence, so slices copy them and no index is built.
    tail_start = (offsets[order.sequences] + order.num_shared).tolist()
    tail_stop = (offsets[order.sequences] + order.num_rows).tolist()
    tails = [slice(start, stop) for start, stop in zip(tail_start, tail_stop, strict=True)]
    labels = [tokens[tail.start + 1 : tail.stop + 1] for tail in tails]
    place = np.arange(num_rows) - np.repeat(first_row - order.num_shared, order.num_new)

    segment_row = first_row[segment_tail] + segment_start - order.num_shared[segment_tail]
    cu_seqlens_q = np.append(segment_row, num_rows)
    segment_end = segment_start + np.diff(cu_seqlens_q)
    kv_rows = [paths[tail][:end] for tail, end in zip(last_tail.tolist(), segment_end.tolist(), strict=True)]

    prompts = prompt_lengths[order.sequences]
    response_rows = np.concatenate([path[p - 1 :] for path, p in zip(paths, prompts.tolist(), strict=True)])
    num_responses = order.num_rows - prompts + 1
    response_start = offsets[order.sequences] + prompts - 1
    response_index = np.repeat(response_start - _exclusive_cumsum(num_responses), num_responses)
    response_index += np.arange(len(response_rows))
    needs_head = np.zeros(num_rows, dtype=bool)
    needs_head[response_rows] = True
    head_rows = np.flatnonzero(needs_head)
    head_of_row = np.cumsum(needs_head, dtype=np.int32) - 1

    return PackedLayout(
        input_ids=np.concatenate([tokens[tail] for tail in tails]),
        token_index=place + np.repeat(offsets[order.sequences], order.num_new),
        position_ids=place,
        key_place=place,
        labels=np.concatenate(labels),
        segment_parent=segment_parent,
        segment_start=segment_start,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=np.concatenate([[0], np.cumsum(segment_end)]),
        kv_rows=np.concatenate(kv_rows),
        head_rows=head_rows,
        response_index=response_index,
        response_head=head_of_row[response_rows],
        head_sequence=order.sequences[np.searchsorted(first_row, head_rows, side="right") - 1],
        num_sequences=len(lengths),
        num_logical_tokens=int(lengths.sum()),
    )


def _exclusive_cumsum(counts: IntArray) -> IntArray:
    return np.cumsum(counts) - counts


def _paths(order: PrefixOrder, first_row: IntArray) -> list[IntArray]:
    """Rows of every sequence in sorted order: those shared with the one before, then its own *tail*."""
    paths: list[IntArray] = []
    for shared, row, new in zip(order.num_shared.tolist(), first_row.tolist(), order.num_new.tolist(), strict=True):
        tail = np.arange(row, row + new, dtype=np.int32)
        paths.append(np.concatenate([paths[-1][:shared], tail]) if shared else tail)
    return paths


def _segments(order: PrefixOrder) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut each tail where later sequences branch off, and join it to one that alone goes on where it ends.

    Returns the tail (index in sorted order) that a segment begins in, its start position, its parent and the tail it
    ends in, for every segment, ordered by first row.
    """
    owner = _branch_owner(order.num_shared)
    branches = np.flatnonzero(owner >= 0)
    cut_tail, cut_start = owner[branches], order.num_shared[branches]
    inside = cut_start < order.num_rows[cut_tail]
    tails = np.flatnonzero(order.num_new > 0)

    stride = int(order.num_rows.max()) + 1
    keys = np.unique(
        np.concatenate([tails * stride + order.num_shared[tails], (cut_tail * stride + cut_start)[inside]])
    )
    tail, start = keys // stride, keys % stride
    parent = np.arange(len(keys)) - 1
    first = start == order.num_shared[tail]
    # A tail's first segment continues the segment of its owner's tail that ends where it branches off.
    parent[first] = np.searchsorted(keys, owner[tail[first]] * stride + start[first]) - 1
    parent[start == 0] = -1
    # An only child's rows follow its parent's, and whoever reads the child reads both.
    joined = (parent >= 0) & (np.bincount(parent + 1, minlength=len(keys) + 1)[parent + 1] == 1)
    begins = np.flatnonzero(~joined)
    number = np.cumsum(~joined) - 1
    parents = parent[begins]
    last = tail[np.append(begins[1:], len(keys)) - 1]
    return tail[begins], start[begins], np.where(parents >= 0, number[parents], -1), last


def _branch_owner(num_shared: IntArray) -> IntArray:
    """For each sequence, the earlier one whose tail holds the last row it shares; -1 where it shares none.

    That is the nearest earlier sequence which itself shares fewer rows ("previous smaller value").
    """
    owner = np.full(len(num_shared), -1, dtype=np.int64)
    stack: list[int] = []
    shared = num_shared.tolist()
    for k, rows in enumerate(shared):
        while stack and shared[stack[-1]] >= rows:
            stack.pop()
        if rows:
            owner[k] = stack[-1]
        stack.append(k)
    return owner
