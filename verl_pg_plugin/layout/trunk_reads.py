"""The keys of packed rows told apart: what rows read of the trunk above them, and the rest.

A trunk is one segment of a tree that many others lie below, as the prompt of a group, with or without what all prompts
begin with above it. All rows below a trunk read all of it, so as keys it needs no copies: one varlen problem, not
causal, has the rows below each trunk as queries and the trunk's own rows as keys. What is left is a packed layout once
more, in which a trunk's children hang where it hung.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_pg_plugin.layout.order import IntArray
from verl_pg_plugin.layout.packed import PackedLayout

COPIES_PER_ROW = 3
"""Keys of trunks that would be copied for each row, from which on two calls without them are faster than one with them.

Measured on an H200 with flash-attn 2 and 4, 32 query and 8 key heads of 128: below, the two calls are up to a third
slower, at 3 to 4 within 1% with flash-attn 2, and at 43 twice and nearly three times as fast.
"""


@dataclass(frozen=True)
class TrunkReads:
    """What rows read of the trunks above them, see the module.

    Attributes:
        rest: the layout without those reads; rows are the same, segments below a trunk lack its keys.
        rows: queries of the problem, from the first row below the first trunk on.
        keys: its keys, up to the last row of the last trunk.
        cu_seqlens_q, cu_seqlens_k: (E+1,) bounds in ``rows`` and ``keys``. Rows between them that belong to no read are
            queries without keys, or keys without queries.
    """

    rest: PackedLayout
    rows: slice
    keys: slice
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray

    @property
    def max_seqlen_q(self) -> int:
        return int(np.diff(self.cu_seqlens_q).max())

    @property
    def max_seqlen_k(self) -> int:
        return int(np.diff(self.cu_seqlens_k).max())


def read_trunks(layout: PackedLayout, copies_per_row: float = COPIES_PER_ROW) -> TrunkReads | None:
    """Tell the reads of trunks apart where that avoids so many copies; None elsewhere."""
    trunk, stop = _trunks(layout)
    num_own, below_one = np.diff(layout.cu_seqlens_q), trunk >= 0
    num_read = np.where(below_one, num_own[trunk], 0)  # keys that each segment reads of its trunk
    if num_read.sum() < max(copies_per_row * layout.num_tokens, 1):
        return None

    # Where reads begin and end; between two of them lie rows that are nobody's keys, and queries without keys.
    trunks = np.unique(trunk[below_one])
    first, below, last = layout.cu_seqlens_q[trunks], layout.cu_seqlens_q[trunks + 1], stop[trunks]
    queries = np.stack([below, last, last], axis=1).reshape(-1)[:-1]
    keys = np.stack([first, below, np.append(first[1:], 0)], axis=1).reshape(-1)[:-1]
    moves = np.append(True, (np.diff(queries) > 0) | (np.diff(keys) > 0))
    queries, keys = queries[moves], keys[moves]
    return TrunkReads(
        rest=_without_trunks(layout, trunk, num_read),
        rows=slice(int(queries[0]), int(queries[-1])),
        keys=slice(int(keys[0]), int(keys[-1])),
        cu_seqlens_q=queries - queries[0],
        cu_seqlens_k=keys - keys[0],
    )


def _trunks(layout: PackedLayout) -> tuple[IntArray, IntArray]:
    """The trunk above each of the S segments, -1 for none, and the row behind the last one below each segment.

    No trunk lies below another. Of all such choices this one avoids most copies, of two that avoid as many the upper.
    """
    parents = layout.segment_parent.tolist()
    num_own, stop = np.diff(layout.cu_seqlens_q).tolist(), layout.cu_seqlens_q[1:].tolist()
    num_below, best_below = [0] * len(parents), [0] * len(parents)
    for s in range(len(parents) - 1, -1, -1):  # parents stand in front of their children
        if (parent := parents[s]) >= 0:
            num_below[parent] += 1 + num_below[s]
            best_below[parent] += max(num_own[s] * num_below[s], best_below[s])
            stop[parent] = max(stop[parent], stop[s])
    is_trunk, trunk = [False] * len(parents), [-1] * len(parents)
    for s, parent in enumerate(parents):
        if parent >= 0:
            trunk[s] = parent if is_trunk[parent] else trunk[parent]
        is_trunk[s] = trunk[s] < 0 and num_below[s] > 0 and num_own[s] * num_below[s] >= best_below[s]
    return np.asarray(trunk), np.asarray(stop)


def _without_trunks(layout: PackedLayout, trunk: IntArray, num_read: IntArray) -> PackedLayout:
    """The same rows, of which each segment reads ``num_read`` (S,) fewer: those of its ``trunk``."""
    parents, num_keys = layout.segment_parent, np.diff(layout.cu_seqlens_k)
    place = np.arange(len(layout.kv_index)) - np.repeat(layout.cu_seqlens_k[:-1], num_keys)
    first = np.where(trunk >= 0, layout.segment_start[trunk], 0)  # place of the trunk's keys in the segment's
    of_trunk = (place >= np.repeat(first, num_keys)) & (place < np.repeat(first + num_read, num_keys))
    return replace(
        layout,
        segment_parent=np.where((trunk >= 0) & (parents == trunk), parents[parents], parents),
        segment_start=layout.segment_start - num_read,
        cu_seqlens_k=np.concatenate([[0], np.cumsum(num_keys - num_read)]),
        kv_index=layout.kv_index[~of_trunk],
        key_place=layout.key_place - np.repeat(num_read, np.diff(layout.cu_seqlens_q)),
    )
