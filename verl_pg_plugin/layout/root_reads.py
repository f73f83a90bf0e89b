"""The keys of packed rows told apart: what segments read of the root of their tree, and the rest.

A root is the shared prefix of a group, as a rule by far the longest of what its segments read. All rows below it read
all of it, so as keys it needs no copies: one varlen problem, not causal, has the rows below each root as queries and
the root's own rows as keys. What is left is a packed layout once more, in which the roots' children are roots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_pg_plugin.layout.packed_layout import PackedLayout
from verl_pg_plugin.layout.prefix_order import IntArray

COPIES_PER_ROW = 3
"""Keys of roots that would be copied for each row, from which on two calls without them are faster than one with them.

Measured on an H200 with flash-attn 2 and 4, 32 query and 8 key heads of 128: below, the two calls are up to a third
slower, at 3 to 4 within 1% with flash-attn 2, and at 43 twice and nearly three times as fast.
"""


@dataclass(frozen=True)
class RootReads:
    """What rows read of the roots above them, see the module.

    Attributes:
        rest: the layout without those reads; rows are the same, the keys of a segment begin below its root.
        rows: queries of the problem, from the first row below the first root on.
        keys: its keys, up to the last row of the last root.
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


def read_roots(layout: PackedLayout, copies_per_row: float = COPIES_PER_ROW) -> RootReads | None:
    """Tell the reads of roots apart where that avoids so many copies; None elsewhere."""
    is_root = layout.segment_parent < 0
    roots, tree = np.flatnonzero(is_root), np.cumsum(is_root) - 1
    first = layout.cu_seqlens_q[roots]  # of each tree
    below = layout.cu_seqlens_q[roots + 1]  # its first row below the root
    last = np.append(first[1:], layout.num_rows)
    above = np.where(is_root, 0, (below - first)[tree])  # keys that each segment reads of its root
    if above.sum() < max(copies_per_row * layout.num_rows, 1):
        return None

    # Where reads begin and end; between two of them lie the rows below a root, as nobody's keys, and then the next
    # root's own rows, as queries without keys.
    queries = np.stack([below, last, last], axis=1).reshape(-1)[:-1]
    keys = np.stack([first, below, last], axis=1).reshape(-1)[:-1]
    moves = np.append(True, (np.diff(queries) > 0) | (np.diff(keys) > 0))
    queries, keys = queries[moves], keys[moves]
    return RootReads(
        rest=_without_roots(layout, above, tree),
        rows=slice(int(queries[0]), int(queries[-1])),
        keys=slice(int(keys[0]), int(keys[-1])),
        cu_seqlens_q=queries - queries[0],
        cu_seqlens_k=keys - keys[0],
    )


def _without_roots(layout: PackedLayout, above: IntArray, tree: IntArray) -> PackedLayout:
    """The same rows, of which each segment reads ``above`` (S,) fewer at the start."""
    parents, num_keys = layout.segment_parent, np.diff(layout.cu_seqlens_k)
    below_another = (parents >= 0) & (parents[parents] >= 0)
    place = np.arange(len(layout.kv_rows)) - np.repeat(layout.cu_seqlens_k[:-1], num_keys)
    return replace(
        layout,
        segment_parent=np.where(below_another, parents, -1),
        segment_start=layout.segment_start - above,
        cu_seqlens_k=np.concatenate([[0], np.cumsum(num_keys - above)]),
        kv_rows=layout.kv_rows[place >= np.repeat(above, num_keys)],
        key_place=layout.key_place - np.repeat(above, np.diff(layout.cu_seqlens_q)),
    )
