"""Attention over a prefix tree as varlen problems.

In the forward the keys of each segment lie side by side, ``[ancestors' tokens | own tokens]``, so that each query's
softmax is computed and rounded once. Keys that several segments read are gathered KV: copied, never more than a stated
number for each token at once.

The backward reads shared prefixes where they lie, such as the prompt of a group. All tokens below a prefix read all of
it, so one problem that is not causal has them as queries and the tokens of the prefix as keys. What is left are the
segments without these keys.
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
"""Gathered keys that the forward holds at once for each token that it reads."""
GATHERED_IN_BACKWARD = 2
"""The same of the backward.

With 32 query and 8 key heads of 128 in bf16 a gathered key takes 4 kB in the forward and 24 in the backward: key and
value, their gradients, and those that flash-attn 2 writes for each query head before it adds them up. With two for each
token attention's backward takes no more than the MLP's of most models; ``planning.memory`` counts the more of both.
"""
ALWAYS_GATHERED = 131_072
"""Gathered keys that the backward may hold however few the tokens: 3.2 GB with these heads, of what devices reserve.

So it is with latent attention's 16 heads, each of which has a key of 192 and a padded value; 128 take eight times that.
"""
SAVED_PER_TOKEN = 3
"""Gathered keys per token from which on one more problem, which saves them, is faster than gathering them.

On an H200 with flash-attn 2 and 4, 32 query and 8 key heads of 128: below, two problems are up to a third slower, at 3
to 4 within 1% with flash-attn 2, and at 43 twice and nearly three times as fast.
"""
SAVED_OVER_LIMIT = 1
"""The same where more keys would be gathered than the backward may hold at once."""
SHORTEST_IN_PLACE = 64
"""Tokens of the shortest prefix that is read in place, half a kernel's block of keys.

A kernel rounds what each problem adds to a query's gradient. That is one rounding more below a prefix that is read in
place, as large as the kernel's own error, and tokens right below a short one have the largest gradients.
"""


@dataclass(frozen=True)
class VarlenCall:
    """One call of a varlen kernel: a problem, and which tokens of a packed forward it reads."""

    rows: slice  # its queries, of the T packed tokens
    keys: slice | Gather  # its keys, of the [c cached | T packed] tokens; a ``Gather`` where they are copied
    problem: Varlen  # their segments, and whether it is causal; a layer's options say the rest

    def read(self, *of_tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return the keys and values that the call reads."""
        if isinstance(self.keys, slice):
            return [x[self.keys] for x in of_tokens]
        return [x.index_select(0, self.keys.tokens) for x in of_tokens]


@dataclass
class AttentionPlan:
    """The kernel calls of one packed forward and of its backward."""

    forward: list[VarlenCall]  # they cover every token once
    layout: PackedLayout | None = None  # to make those of the backward from; None where they are the same
    seen: np.ndarray | None = None  # (K,) which of its keys a window leaves; None for all
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, layout: PackedLayout, device: torch.device | str, window: int = -1) -> "AttentionPlan":
        """Sends index maps to ``device`` without waiting; keys that a ``window`` hides from a segment are left out."""
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
        """Calls that together hold each (query, key) pair once; the first ones cover every token. Made when first
        asked for: a forward without gradient needs none."""
        if self.layout is None:
            return self.forward
        in_place, rest = read_in_place(self.layout, self.device) if self.seen is None else ([], self.seen)
        most = most_in_backward(self.layout)
        if not in_place and all(isinstance(p.keys, slice) or len(p.keys.tokens) <= most for p in self.forward):
            return self.forward
        return [*_causal_calls(self.layout, rest, most, self.device), *in_place]


def most_in_backward(layout: PackedLayout) -> float:
    """Gathered keys that the backward holds at once."""
    num_keys = _num_keys(layout)
    return max(GATHERED_IN_BACKWARD * num_keys, min(ALWAYS_GATHERED, GATHERED_PER_TOKEN * num_keys))


def _num_keys(layout: PackedLayout) -> int:
    return layout.num_cached + layout.num_tokens


def _causal_calls(
    layout: PackedLayout, kept: np.ndarray | None, most: float, device: torch.device | str
) -> list[VarlenCall]:
    """Segments with the ``kept`` (K,) of their keys, or all, as many at once as have ``most`` keys."""
    kv, cu_q, cu_k = layout.kv_index, layout.cu_seqlens_q, layout.cu_seqlens_k
    if kept is not None:
        kv, cu_k = kv[kept], np.append(0, np.cumsum(np.add.reduceat(kept, cu_k[:-1], dtype=np.int64)))
    on_device = to_device(kv, device, torch.int32)
    calls, start = [], 0
    while start < len(cu_q) - 1:
        stop = max(int(np.searchsorted(cu_k, cu_k[start] + most, side="right")) - 1, start + 1)
        first, last = int(cu_k[start]), int(cu_k[stop])
        rows, keys = slice(int(cu_q[start]), int(cu_q[stop])), slice(int(kv[first]), int(kv[first]) + last - first)
        adjoin = np.array_equal(kv[first:last], np.arange(keys.start, keys.stop))
        there = keys if adjoin else Gather(on_device[first:last], _num_keys(layout))
        problem = _varlen(cu_q[start : stop + 1] - rows.start, cu_k[start : stop + 1] - first, device)
        calls.append(VarlenCall(rows, there, problem))
        start = stop
    return calls


def _varlen(cu_q: IntArray, cu_k: IntArray, device: torch.device | str, causal: bool = True) -> Varlen:
    longest_q, longest_k = int(np.diff(cu_q).max()), int(np.diff(cu_k).max())
    on_device = to_device(cu_q, device, torch.int32), to_device(cu_k, device, torch.int32)
    return Varlen(*on_device, longest_q, longest_k, causal=causal)


def read_in_place(layout: PackedLayout, device: torch.device | str = "cpu") -> tuple[list[VarlenCall], np.ndarray]:
    """Calls that read prefixes and save enough gathered keys, and which (K,) of the keys are left.

    A call has the prefixes of one level: those below as many others that are long enough. So none lies below another.
    Cached tokens that the same segments read count as one segment more, whose queries are elsewhere.
    """
    num_cached, num_read = layout.num_cached, layout.num_cached_keys
    ends = np.unique(np.append(num_read[num_read > 0], num_cached)) if num_cached else num_read[:0]
    # Nodes of the tree in the order of their tokens: cached ones, each below the one before it, then the segments.
    of_cached = np.where(num_read > 0, np.searchsorted(ends, num_read), -1)
    parents = np.where(layout.segment_parent >= 0, len(ends) + layout.segment_parent, of_cached)
    parents = np.concatenate([np.arange(len(ends)) - 1, parents])
    bounds = np.concatenate([np.append(0, ends), num_cached + layout.cu_seqlens_q[1:]])
    lengths = np.diff(bounds)
    is_long = lengths >= SHORTEST_IN_PLACE
    level, num_below = np.zeros_like(lengths), np.zeros_like(lengths)
    stop = bounds[1:].copy()  # where what lies below each node ends
    for node, parent in enumerate(parents.tolist()):  # parents stand in front of their children
        if parent >= 0:
            level[node] = level[parent] + is_long[parent]
    for node, parent in reversed(list(enumerate(parents.tolist()))):
        if parent >= 0:
            num_below[parent] += num_below[node] + (node >= len(ends))
            stop[parent] = max(stop[parent], stop[node])

    saved = np.where(is_long, lengths * num_below, 0)
    saved_by_level = np.bincount(level, saved)
    found: list[VarlenCall] = []
    is_read = np.zeros(len(parents), dtype=bool)
    left = len(layout.kv_index)  # keys that no call reads in place
    for at_level in np.argsort(-saved_by_level, kind="stable"):
        enough = SAVED_PER_TOKEN if left <= most_in_backward(layout) else SAVED_OVER_LIMIT
        if saved_by_level[at_level] < max(enough * layout.num_tokens, 1):
            break
        left -= saved_by_level[at_level]
        prefixes = np.flatnonzero((level == at_level) & (saved > 0))
        found.append(_reads(prefixes, stop, bounds, num_cached, device))
        is_read[prefixes] = True
    node_of = np.repeat(np.arange(len(parents)), lengths)
    own = np.repeat(num_cached + layout.cu_seqlens_q[:-1], np.diff(layout.cu_seqlens_k))
    return found, ~is_read[node_of[layout.kv_index]] | (layout.kv_index >= own)


def _reads(
    prefixes: IntArray, stop: IntArray, bounds: IntArray, num_cached: int, device: torch.device | str
) -> VarlenCall:
    """What lies below each prefix reads it, up to ``stop``; tokens in between are no keys here, or queries without."""
    first, last = bounds[prefixes], bounds[prefixes + 1]
    queries = np.stack([np.maximum(last, num_cached), stop[prefixes], stop[prefixes]], axis=1).reshape(-1)[:-1]
    keys = np.stack([first, last, np.append(first[1:], 0)], axis=1).reshape(-1)[:-1]
    moves = np.append(True, (np.diff(queries) > 0) | (np.diff(keys) > 0))
    queries, keys = queries[moves] - num_cached, keys[moves]
    rows, there = slice(int(queries[0]), int(queries[-1])), slice(int(keys[0]), int(keys[-1]))
    return VarlenCall(rows, there, _varlen(queries - rows.start, keys - there.start, device, causal=False))
