"""Attention over a prefix tree as calls of a varlen kernel.

In the forward, the keys of a segment are consecutive, ``[ancestors' tokens | own tokens]``, so each query's softmax is
computed and rounded once. Keys that several segments read are copied: gathered KV, limited per call.

The backward reads long shared prefixes in place. All tokens below a prefix read all of it, so one call that is not
causal has them as queries and the prefix as keys. Other calls have the remaining keys of each segment.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from verl_pg_plugin.attention.gather import Gather
from verl_pg_plugin.attention.passes import Varlen
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.layout.order import IntArray
from verl_pg_plugin.transfer import to_device

GATHERED_PER_TOKEN = 12
"""Limit of gathered keys in one forward call, per token that the forward reads."""
GATHERED_IN_BACKWARD = 2
"""The same for the backward: at two per token, attention's backward takes no more memory than most models' MLP.

With 32 query and 8 key heads of 128 in bf16, a gathered key takes 4 kB in the forward and 24 kB in the backward. These
are key, value, their gradients, and flash-attn 2's gradients per query head.
"""
ALWAYS_GATHERED = 131_072
"""Gathered keys that the backward may always hold: 3.2 GB with these heads, within the device reserve."""
SAVED_PER_TOKEN = 3
"""Gathered keys per token that a call must save to read prefixes in place.

On an H200 with these heads, the call is up to a third slower below 3, and equal within 1% at 3 to 4 (flash-attn 2). At
43 it is twice as fast with flash-attn 2 and nearly three times with flash-attn 4.
"""
SAVED_OVER_LIMIT = 1
"""The same if the gathered keys exceed the limit of the backward."""
SHORTEST_IN_PLACE = 64
"""Tokens of the shortest prefix read in place, half a kernel's block of keys.

Each call rounds its part of a query's gradient, and the tokens right below a short prefix have the largest gradients.
"""


@dataclass(frozen=True)
class VarlenCall:
    """One call of a varlen kernel: a problem, and the tokens of a packed forward that it reads."""

    rows: slice  # queries among the T packed tokens
    keys: slice | Gather  # keys among the [c cached | T packed] tokens; ``Gather`` for copies
    problem: Varlen  # segments and causality; the layer's options are set later

    def read(self, *of_tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return the keys and values that the call reads."""
        if isinstance(self.keys, slice):
            return [x[self.keys] for x in of_tokens]
        return [x.index_select(0, self.keys.tokens) for x in of_tokens]


@dataclass
class AttentionPlan:
    """Kernel calls of one packed forward and of its backward."""

    forward: list[VarlenCall]  # together they have every query once
    layout: PackedLayout | None = None  # source of the backward's calls; None if they equal the forward's
    seen: np.ndarray | None = None  # (K,) bool, keys that the window does not hide from all queries; None for all
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, layout: PackedLayout, device: torch.device | str, window: int = -1) -> "AttentionPlan":
        """Build the plan on ``device``, without the keys that a ``window`` hides from a whole segment."""
        seen = None
        if window >= 0:
            num_keys = np.diff(layout.cu_seqlens_k)
            first = layout.cu_seqlens_k[:-1] + num_keys - np.diff(layout.cu_seqlens_q) - window
            seen = np.arange(len(layout.kv_index)) >= np.repeat(first, num_keys)
        calls = _causal_calls(layout, seen, GATHERED_PER_TOKEN * _num_keys(layout), device)
        shares = len(calls) > 1 or isinstance(calls[0].keys, Gather)
        return cls(calls, layout if shares else None, seen, device)

    @cached_property
    def backward(self) -> list[VarlenCall]:
        """Calls that together have each (query, key) pair once; the first ones have every query."""
        if self.layout is None:
            return self.forward
        in_place, rest = read_in_place(self.layout, self.device) if self.seen is None else ([], self.seen)
        most = backward_limit(self.layout)
        if not in_place and all(isinstance(p.keys, slice) or len(p.keys.tokens) <= most for p in self.forward):
            return self.forward
        return [*_causal_calls(self.layout, rest, most, self.device), *in_place]


def backward_limit(layout: PackedLayout) -> float:
    """Limit of gathered keys in one backward call."""
    num_keys = _num_keys(layout)
    return max(GATHERED_IN_BACKWARD * num_keys, min(ALWAYS_GATHERED, GATHERED_PER_TOKEN * num_keys))


def _num_keys(layout: PackedLayout) -> int:
    return layout.num_cached + layout.num_tokens


def _causal_calls(
    layout: PackedLayout, kept: np.ndarray | None, most: float, device: torch.device | str
) -> list[VarlenCall]:
    """Return calls that together have every segment's queries once, and its keys in ``kv_index`` with the causal mask.

    A call has consecutive segments. It reads its keys in place if they are consecutive, and else gathers them.

    Args:
        kept: (K,) bool, keys of ``kv_index`` that the calls read; None for all.
        most: limit of keys in a call; a segment with more is a call of its own.
    """
    kv, cu_q, cu_k = layout.kv_index, layout.cu_seqlens_q, layout.cu_seqlens_k
    if kept is not None:
        kv, cu_k = kv[kept], np.append(0, np.cumsum(np.add.reduceat(kept, cu_k[:-1], dtype=np.int64)))
    on_device = to_device(kv, device, torch.int32)
    calls, start = [], 0
    while start < len(cu_q) - 1:
        stop = max(int(np.searchsorted(cu_k, cu_k[start] + most, side="right")) - 1, start + 1)
        first, last = int(cu_k[start]), int(cu_k[stop])
        rows, keys = slice(int(cu_q[start]), int(cu_q[stop])), slice(int(kv[first]), int(kv[first]) + last - first)
        consecutive = np.array_equal(kv[first:last], np.arange(keys.start, keys.stop))
        source = keys if consecutive else Gather(on_device[first:last], _num_keys(layout))
        problem = _varlen(cu_q[start : stop + 1] - rows.start, cu_k[start : stop + 1] - first, device)
        calls.append(VarlenCall(rows, source, problem))
        start = stop
    return calls


def _varlen(cu_q: IntArray, cu_k: IntArray, device: torch.device | str, causal: bool = True) -> Varlen:
    longest_q, longest_k = int(np.diff(cu_q).max()), int(np.diff(cu_k).max())
    on_device = to_device(cu_q, device, torch.int32), to_device(cu_k, device, torch.int32)
    return Varlen(*on_device, longest_q, longest_k, causal=causal)


def read_in_place(layout: PackedLayout, device: torch.device | str = "cpu") -> tuple[list[VarlenCall], np.ndarray]:
    """Return calls that read long prefixes in place, and which (K,) keys other calls must read.

    A call has the prefixes of one level, the number of long prefixes above, so none is an ancestor of another. Cached
    tokens that the same segments read count as a segment without queries.
    """
    num_cached, num_read = layout.num_cached, layout.num_cached_keys
    ends = np.unique(np.append(num_read[num_read > 0], num_cached)) if num_cached else num_read[:0]
    # Nodes of the tree in the order of their tokens: a path of cached ones, then the segments.
    of_cached = np.where(num_read > 0, np.searchsorted(ends, num_read), -1)
    parents = np.where(layout.segment_parent >= 0, len(ends) + layout.segment_parent, of_cached)
    parents = np.concatenate([np.arange(len(ends)) - 1, parents])
    bounds = np.concatenate([np.append(0, ends), num_cached + layout.cu_seqlens_q[1:]])
    lengths = np.diff(bounds)
    is_long = lengths >= SHORTEST_IN_PLACE
    level, num_below = np.zeros_like(lengths), np.zeros_like(lengths)
    stop = bounds[1:].copy()  # end of each node's descendants
    for node, parent in enumerate(parents.tolist()):  # parents come before their children
        if parent >= 0:
            level[node] = level[parent] + is_long[parent]
    for node, parent in reversed(list(enumerate(parents.tolist()))):
        if parent >= 0:
            num_below[parent] += num_below[node] + (node >= len(ends))
            stop[parent] = max(stop[parent], stop[node])

    saved = np.where(is_long, lengths * num_below, 0)
    saved_by_level = np.bincount(level, saved)
    calls: list[VarlenCall] = []
    is_read = np.zeros(len(parents), dtype=bool)
    left = len(layout.kv_index)  # keys that are not read in place
    for at_level in np.argsort(-saved_by_level, kind="stable"):
        enough = SAVED_PER_TOKEN if left <= backward_limit(layout) else SAVED_OVER_LIMIT
        if saved_by_level[at_level] < max(enough * layout.num_tokens, 1):
            break
        left -= saved_by_level[at_level]
        prefixes = np.flatnonzero((level == at_level) & (saved > 0))
        calls.append(_call_in_place(prefixes, stop, bounds, num_cached, device))
        is_read[prefixes] = True
    node_of = np.repeat(np.arange(len(parents)), lengths)
    own = np.repeat(num_cached + layout.cu_seqlens_q[:-1], np.diff(layout.cu_seqlens_k))
    return calls, ~is_read[node_of[layout.kv_index]] | (layout.kv_index >= own)


def _call_in_place(
    prefixes: IntArray, stop: IntArray, bounds: IntArray, num_cached: int, device: torch.device | str
) -> VarlenCall:
    """Call in which the tokens below each prefix, up to ``stop``, read it; gaps have no keys or no queries."""
    first, last = bounds[prefixes], bounds[prefixes + 1]
    queries = np.stack([np.maximum(last, num_cached), stop[prefixes], stop[prefixes]], axis=1).reshape(-1)[:-1]
    keys = np.stack([first, last, np.append(first[1:], 0)], axis=1).reshape(-1)[:-1]
    moves = np.append(True, (np.diff(queries) > 0) | (np.diff(keys) > 0))
    queries, keys = queries[moves] - num_cached, keys[moves]
    rows, source = slice(int(queries[0]), int(queries[-1])), slice(int(keys[0]), int(keys[-1]))
    return VarlenCall(rows, source, _varlen(queries - rows.start, keys - source.start, device, causal=False))
