"""One part of a chain: a packed layout whose first rows are keys only, since earlier parts have computed them.

A trie that exceeds a micro-batch is cut, in sorted order, into parts of neighbouring sequences. A part computes the
rows that no earlier part has. What else it reads is a prefix of its first sequence, the *carried* rows

    part 1   [p_0 .. p_{P-2}] [p_{P-1} r^1_0 ..] [p_{P-1} r^2_0 ..]
    part 2    carried: keys   [p_{P-1} r^3_0 ..] [p_{P-1} r^4_0 ..]

which lie on a *stack*, indexed by their position. The chain's sequences sort first in their part, so row, position and
index into the stack are one number, and the index maps of the packed layout stay as they are: queries drop out.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from verl_pg_plugin.layout.packed_layout import PackedLayout, build_packed_layout
from verl_pg_plugin.layout.prefix_order import IntArray

_ROW_FIELDS = ("input_ids", "token_index", "position_ids", "labels", "key_place")


@dataclass(frozen=True, kw_only=True)
class ChainPart:
    """Where a part stands in its chain; its sequences are the chain's, in sorted order, and then others.

    Attributes:
        num_chain: how many of them belong to the chain; 0 in an ordinary micro-batch.
        num_carried: leading rows of the first one that earlier parts own.
        keep: how many of those the next part reads as well.
        read_next: rows that the next part carries, 0 for the last part; they are a prefix of the chain's last one here.
    """

    num_chain: int
    num_carried: int = 0
    keep: int = 0
    read_next: int = 0


@dataclass(frozen=True, kw_only=True)
class CarriedLayout(PackedLayout):
    """Index maps of a forward over T own rows which also reads c rows of the chain's path; see ``PackedLayout``.

    Differences: ``kv_rows`` index [c carried rows | T own rows], ``response_head`` indexes [carried heads | own
    ``head_rows``], and ``segment_parent`` is -1 where the parent is carried. ``segment_start`` stays a position.

    Attributes:
        num_carried: c; rows of the path at positions 0 .. c-1 that other parts own: keys and values only.
        carried_heads: (C,) positions of carried rows whose head outputs this part's responses read, ascending.
        handover: (H,) own rows (index into the T) that later parts read; they hold the positions ``handover_start ..
            handover_start + H`` of the path.
        handover_start: rows of the stack that are still valid below the ones handed over.
        handover_heads: index into ``handover`` of rows that hand over head outputs too; they are in ``head_rows``.
        export: rows of the path that must be computed without gradient before this part, training only; None where
            the stack already has all of them.
    """

    num_carried: int
    carried_heads: IntArray
    handover: IntArray
    handover_start: int
    handover_heads: IntArray
    export: "CarriedLayout | None" = None

    @property
    def shares_rows(self) -> bool:
        """Always: part of a chain."""
        return True

    @property
    def num_copied_keys(self) -> int:
        """0 where the keys are [carried | own] rows, each once and in that order."""
        whole = np.arange(self.num_carried + self.num_rows)
        return 0 if np.array_equal(self.kv_rows, whole) else len(self.kv_rows)

    @property
    def stands_alone(self) -> bool:
        return False

    @property
    def num_roots(self) -> int:
        """Groups whose first row is computed here, so that a chain counts once."""
        return int((self.segment_start == 0).sum())


def build_carried_layout(
    tokens: IntArray,
    offsets: IntArray,
    prompt_lengths: IntArray,
    classes: IntArray | None = None,
    inside: IntArray | None = None,
    *,
    part: ChainPart,
    first_head: int,
    forward_only: bool,
) -> CarriedLayout:
    """Lay out one part.

    Args:
        tokens, offsets, prompt_lengths, classes, inside: its B sequences, as ``build_packed_layout`` takes them. The
            chain's come first, in the order of ``PrefixOrder``; all others are whole groups.
        part: which of them those are, and what goes from part to part.
        first_head: lowest position whose label lies in a response of any sequence of the chain. Rows handed over from
            there on need the head even where they are prompt here, because they may be a label elsewhere.
        forward_only: the stack is filled by earlier parts and nothing is exported.

    Raises:
        ValueError: the sequences are refused by ``build_packed_layout``, or the numbers describe no part of a chain.
    """
    num_chain, num_carried, keep, read_next = part.num_chain, part.num_carried, part.keep, part.read_next
    own_class = np.zeros(len(offsets) - 1, dtype=np.int64) if classes is None else classes - classes.min() + 1
    apart = np.where(np.arange(len(own_class)) < num_chain, 0, 1 + own_class)
    packed = build_packed_layout(tokens, offsets, prompt_lengths, apart, inside)

    handover = _path_of(packed, offsets, num_chain - 1)[keep:read_next] if read_next else np.zeros(0, dtype=np.int64)
    if len(handover) != max(read_next - keep, 0) or (handover < num_carried).any() or packed.num_rows <= num_carried:
        raise ValueError(
            f"no part of a chain: {packed.num_rows} rows of which {num_carried} carried, {keep} kept, {read_next} read "
            "next; its sequences must be neighbours in sorted order and own at least one row"
        )
    handover_heads = _labelled(keep, len(handover), first_head)
    packed = _with_head_rows(packed, handover[handover_heads], sequence=num_chain - 1)
    return _carry_first_rows(
        packed,
        num_carried,
        handover=handover - num_carried,
        handover_start=keep,
        handover_heads=handover_heads,
        export=None if forward_only or num_carried <= keep else _export(tokens, offsets, keep, num_carried, first_head),
    )


def idle_export(tokens: IntArray, offsets: IntArray, inside: IntArray | None = None) -> CarriedLayout:
    """One row that nobody reads, of the first sequence; all rows of a picture if it begins with one.

    For a part that has nothing to export while another rank's has: FSDP gathers weights on all ranks or on none.
    """
    stop = 1 if inside is None else 1 + int(np.argmin(inside[offsets[0] + 1 : offsets[1]] > 0))
    export = _export(tokens, offsets, start=0, stop=stop, first_head=stop)
    empty = np.zeros(0, dtype=np.int64)
    return replace(export, handover=empty, handover_heads=empty)


def _export(tokens: IntArray, offsets: IntArray, start: int, stop: int, first_head: int) -> CarriedLayout:
    """Rows ``start .. stop`` of the first sequence, which reads the rows before them from the stack."""
    path = tokens[offsets[0] : offsets[0] + stop + 1]  # and the label of its last row
    packed = build_packed_layout(path, np.array([0, stop + 1]), np.array([1]))
    handover = np.arange(stop - start)
    handover_heads = _labelled(start, stop - start, first_head)
    heads = start + handover_heads
    empty = np.zeros(0, dtype=np.int64)
    packed = replace(
        packed,
        head_rows=heads,
        head_sequence=np.zeros_like(heads),
        response_index=empty,  # its outputs are read from the head columns, not from verl's jagged tensor
        response_head=empty,
        num_logical_tokens=int(offsets[1] - offsets[0]),
    )
    return _carry_first_rows(
        packed, start, handover=handover, handover_start=start, handover_heads=handover_heads, export=None
    )


def _labelled(start: int, count: int, first_head: int) -> IntArray:
    """Which of the rows at positions ``start .. start + count`` some response of the chain may read."""
    return np.arange(min(max(first_head - start, 0), count), count)


def _path_of(packed: PackedLayout, offsets: IntArray, sequence: int) -> IntArray:
    """Rows of one sequence: the keys of the segment that holds its last row."""
    last = int(packed.response_head[np.flatnonzero(packed.response_index == offsets[sequence + 1] - 2)[0]])
    segment = int(np.searchsorted(packed.cu_seqlens_q, packed.head_rows[last], side="right")) - 1
    first_key = int(packed.cu_seqlens_k[segment])
    return packed.kv_rows[first_key : first_key + int(offsets[sequence + 1] - offsets[sequence]) - 1].astype(np.int64)


def _with_head_rows(packed: PackedLayout, rows: IntArray, sequence: int) -> PackedLayout:
    """The same layout with more of its rows, which ``sequence`` contains, through the head."""
    heads = np.union1d(packed.head_rows, rows)
    place = np.searchsorted(heads, packed.head_rows)
    owner = np.full(len(heads), sequence)
    owner[place] = packed.head_sequence
    return replace(packed, head_rows=heads, head_sequence=owner, response_head=place[packed.response_head])


def _carry_first_rows(packed: PackedLayout, c: int, **chain: Any) -> CarriedLayout:
    """Drop the queries of the first c rows, which are positions 0 .. c-1 of one path; their keys stay."""
    cu_seqlens_q = np.maximum(packed.cu_seqlens_q - c, 0)
    num_queries, num_keys = np.diff(cu_seqlens_q), np.diff(packed.cu_seqlens_k)
    alive = num_queries > 0
    new_index = np.where(alive, np.cumsum(alive) - 1, -1)
    parent = packed.segment_parent[alive]
    own = packed.head_rows >= c
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    values |= {name: values[name][..., c:] for name in _ROW_FIELDS if name in values}
    values |= {
        "segment_parent": np.where(parent >= 0, new_index[parent], -1),
        "segment_start": (num_keys - num_queries)[alive],
        "cu_seqlens_q": np.append(0, np.cumsum(num_queries[alive])),
        "cu_seqlens_k": np.append(0, np.cumsum(num_keys[alive])),
        "kv_rows": packed.kv_rows[np.repeat(alive, num_keys)],
        "head_rows": packed.head_rows[own] - c,
        "head_sequence": packed.head_sequence[own],
    }
    return CarriedLayout(**values, num_carried=c, carried_heads=packed.head_rows[~own], **chain)
