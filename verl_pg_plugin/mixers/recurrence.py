"""Recurrences over packed tokens: a segment starts from its parent's final state.

Segments of equal depth are independent, so one call computes them: a GRPO group takes two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from verl_pg_plugin.attention.cache import CacheAccess, CacheKey, StateExchange
from verl_pg_plugin.attention.gather import Gather, gather_tokens
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.transfer import to_device

STATE = "state"


@dataclass(frozen=True)
class Depth:
    """The N segments of one depth."""

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor  # (N+1,) int64
    num_children: torch.Tensor | None  # (M,) int64 of the M segments above, in whose order they are; None for roots
    publish: StateExchange | None  # segments at whose end another chunk continues

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, longest, ...) from (tokens, ...), zero at padding."""
        return pad_sequence(x.split(self.lengths), batch_first=True)

    def unpadded(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of ``padded``."""
        return torch.cat([segment[:length] for segment, length in zip(x, self.lengths, strict=True)])


@dataclass(frozen=True)
class Depths:
    """T packed tokens sorted by the depth of their segments."""

    depths: list[Depth]  # from the roots down
    starts: StateExchange | None  # of roots that continue cached tokens; these roots come first
    by_depth: Gather | None = None  # sorts tokens by depth; None if they are sorted
    back: Gather | None = None  # the inverse

    @classmethod
    def from_layout(cls, layout: PackedLayout, device: torch.device) -> "Depths":
        """Sort segments by depth, cut where states are published; siblings are consecutive in a layout."""
        publish = layout.published_states
        ends = layout.publish[publish - layout.publish_start - 1] + 1
        bounds = np.union1d(layout.cu_seqlens_q, ends)
        whole = np.searchsorted(layout.cu_seqlens_q, bounds[:-1], side="right") - 1  # the segment of each piece
        last_piece = np.searchsorted(bounds, layout.cu_seqlens_q[1:]) - 1
        of_whole = layout.segment_parent[whole]
        begins = bounds[:-1] == layout.cu_seqlens_q[whole]
        previous = np.arange(-1, len(whole) - 1)
        parents = np.where(begins, np.where(of_whole >= 0, last_piece[of_whole], -1), previous)
        lengths = np.diff(bounds)
        position = layout.segment_start[whole] + bounds[1:] - layout.cu_seqlens_q[whole]
        depth = np.zeros(len(parents), dtype=np.int64)
        for segment, parent in enumerate(parents.tolist()):  # parents come first
            depth[segment] = depth[parent] + 1 if parent >= 0 else 0
        depths, above, nothing = [], None, np.zeros(0, dtype=np.int64)
        for d in range(int(depth.max()) + 1):
            members = np.flatnonzero(depth == d)
            num_children = None
            if above is not None:
                counted = np.bincount(np.searchsorted(above, parents[members]), minlength=len(above))
                num_children = to_device(counted, device)
            ending = np.flatnonzero(np.isin(bounds[members + 1], ends))
            published = StateExchange.of(nothing, position[members[ending]], ending[:, None], device)
            cu_seqlens = to_device(np.cumsum([0, *lengths[members]]), device)
            depths.append(Depth(tuple(lengths[members].tolist()), cu_seqlens, num_children, published))
            above = members
        roots = layout.segment_start[layout.segment_parent < 0]
        assert roots[: np.count_nonzero(roots)].all(), "roots that continue cached tokens come first"
        starts = StateExchange.of(roots[roots > 0], nothing, nothing[:, None], device)
        order = np.argsort(np.repeat(depth, lengths), kind="stable")
        if (np.diff(order) == 1).all():
            return cls(depths, starts)
        sorts = (to_device(places, device, torch.int32) for places in (order, np.argsort(order, kind="stable")))
        return cls(depths, starts, *(Gather(places, layout.num_tokens) for places in sorts))


class _RepeatState(torch.autograd.Function):
    """Give each child its parent's float32 state; the backward sums over children in a fixed order."""

    @staticmethod
    def forward(ctx: Any, state: torch.Tensor, num_children: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(num_children)
        return state.repeat_interleave(num_children, dim=0, output_size=total)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (num_children,) = ctx.saved_tensors
        total = torch.segment_reduce(grads[0].contiguous(), "sum", lengths=num_children, axis=0, unsafe=True)
        return total, None, None


Recurrence = Callable[
    [Depth, tuple[torch.Tensor, ...], torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor | None]
]
"""Computes the N segments of a depth from (tokens, ...) tensors and (N, ...) initial states; None stands for zeros.

Returns the (tokens, ...) output and, if the last argument is True, the (N, ...) final states.
"""


def run_by_depth(
    depths: Depths,
    recurrence: Recurrence,
    tensors: Sequence[torch.Tensor],
    cache: CacheAccess | None = None,
    layer: int = 0,
) -> torch.Tensor:
    """Return the (T, ...) output of a recurrence over (T, ...) ``tensors``, within each sequence."""
    if depths.by_depth is not None:
        tensors = tuple(gather_tokens(x, depths.by_depth) for x in tensors)
    sizes = [sum(depth.lengths) for depth in depths.depths]
    parts = zip(*(x.split(sizes) for x in tensors), strict=True)
    outs = []
    state = None
    key = CacheKey(layer, STATE)
    if cache is not None and depths.starts is not None:
        cached = cache.state(key._replace(position=depths.starts.read[0]))
        zeros = cached.new_zeros(len(depths.depths[0].lengths) - len(depths.starts.read), *cached.shape[1:])
        state, _ = cache.exchange_states(key, zeros.requires_grad_(torch.is_grad_enabled()), depths.starts)
    for depth, part in zip(depths.depths, parts, strict=True):
        if depth.num_children is not None:
            state = _RepeatState.apply(state, depth.num_children, len(depth.lengths))
        is_read = depth is not depths.depths[-1] or depth.publish is not None
        out, state = recurrence(depth, part, state, is_read)
        if cache is not None and state is not None:
            state, out = cache.exchange_states(key, state, depth.publish, passthrough=out)
        outs.append(out)
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return out if depths.back is None else gather_tokens(out, depths.back)
