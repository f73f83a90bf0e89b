"""The short causal convolution of a Gated DeltaNet layer over shared rows.

All rows go through one plain convolution, as if each followed the one before it in memory. That is wrong for the first
``width - 1`` rows of a segment, whose reach crosses its edge: these are computed once more, in windows that hold the
last rows of the segment's ancestors in front of its own, and put in their places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from verl_pg_plugin.attention.gather import Gather, gather_tokens, to_device
from verl_pg_plugin.layout import PackedLayout

Convolution = Callable[[torch.Tensor], torch.Tensor]
"""(B, D, L) -> (B, D, L), causal, zeros before the first column."""


@dataclass(frozen=True)
class Windows:
    """S windows of 2(W - 1) rows, one for the start of each segment.

    Attributes:
        gather: their rows, one window after the other.
        missing: (S, 2(W - 1)) bool, no row there: what is before a sequence, or behind a short segment.
        fixed: (F,) int64 rows whose convolution is taken from a window.
        place: (F,) int64 where, in the windows one after the other.
    """

    gather: Gather
    missing: torch.Tensor
    fixed: torch.Tensor
    place: torch.Tensor

    @classmethod
    def from_layout(cls, layout: PackedLayout, width: int, device: torch.device) -> Windows:
        """Windows of a convolution that sees ``width`` rows, the row itself included."""
        reach = width - 1
        offset = np.arange(-reach, reach)
        place = layout.segment_start[:, None] + offset  # among the keys of each segment
        ends = layout.segment_start + np.diff(layout.cu_seqlens_q)
        missing = (place < 0) | (place >= ends[:, None])
        rows = layout.kv_index[np.where(missing, 0, layout.cu_seqlens_k[:-1, None] + place)]
        segment, column = np.nonzero(~missing & (offset >= 0))
        return cls(
            gather=Gather.of(to_device(rows.reshape(-1), torch.int32, device), layout.num_tokens),
            missing=to_device(missing, torch.bool, device),
            fixed=to_device(rows[segment, column], torch.int64, device),
            place=to_device(segment * 2 * reach + column, torch.int64, device),
        )


def convolve(x: torch.Tensor, windows: Windows, convolution: Convolution) -> torch.Tensor:
    """Causal convolution in which rows see their own sequences only.

    Args:
        x: (1, D, T) packed rows.
        windows: of their layout.
        convolution: the plain one.

    Returns:
        (1, D, T).
    """
    plain = convolution(x)
    gathered = gather_tokens(x.squeeze(0).transpose(0, 1), windows.gather)
    window_SLD = gathered.view(*windows.missing.shape, -1).masked_fill(windows.missing.unsqueeze(-1), 0.0)
    edges_KD = convolution(window_SLD.transpose(1, 2)).transpose(1, 2).flatten(0, 1)
    return plain.index_copy(2, windows.fixed, edges_KD.index_select(0, windows.place).T.unsqueeze(0))


def plain_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """What transformers computes where the package causal-conv1d is missing; ``weight`` is (D, W).

    Raises:
        ValueError: an activation that is not SiLU.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"the convolution of Gated DeltaNet is followed by SiLU, this one by {activation!r}")
    out = F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[1])
    return out if activation is None else F.silu(out)
