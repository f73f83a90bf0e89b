"""A causal convolution over packed tokens, each within its own sequence.

All packed tokens go through one ordinary convolution. The first ``width - 1`` outputs of a segment are wrong, since
their inputs cross the segment's start. They are recomputed in windows of the ancestors' last tokens followed by the
segment's first, and replace the wrong ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from verl_pg_plugin.attention.cache import CacheAccess, CacheKey, StateExchange
from verl_pg_plugin.attention.gather import Gather, gather_tokens
from verl_pg_plugin.layout import IntArray, PackedLayout
from verl_pg_plugin.transfer import to_device

INPUTS = "inputs"


@dataclass(frozen=True)
class Windows:
    """Windows of 2(W - 1) tokens around the start of each of the S segments."""

    tails: StateExchange | None  # the W - 1 inputs before each position that is read from the cache or published
    num_read: int  # tokens that are read from the cache; they precede the own tokens
    gather: Gather  # tokens of all windows, concatenated
    missing: torch.Tensor  # (S, 2(W - 1)) bool, no token: before a sequence, or after the end of a short segment
    fixed: torch.Tensor  # (F,) int64 own tokens whose output is replaced
    place: torch.Tensor  # (F,) int64 their positions in the concatenated windows

    @classmethod
    def from_layout(cls, layout: PackedLayout, width: int, device: torch.device) -> "Windows":
        """Return the windows of a convolution of ``width`` tokens."""
        reach = width - 1
        offset = np.arange(-reach, reach)
        place = layout.segment_start[:, None] + offset  # index into the keys of each segment
        ends = layout.segment_start + np.diff(layout.cu_seqlens_q)
        missing = (place < 0) | (place >= ends[:, None])
        resumed_at, start = layout.resumed_at, layout.num_cached_keys  # number of cached keys of each segment
        num_read = len(resumed_at) * reach

        def tokens_at(segment: IntArray, place: IntArray) -> IntArray:
            """Return indices into [cached tails | own tokens] of places in segments; arbitrary for missing ones."""
            key = layout.kv_index[layout.cu_seqlens_k[segment, None] + np.maximum(place, 0)].astype(np.int64)
            in_tail = (np.searchsorted(resumed_at, start[segment, None]) + 1) * reach + key - start[segment, None]
            return np.where(key < layout.num_cached, np.maximum(in_tail, 0), key - layout.num_cached + num_read)

        tokens = tokens_at(np.arange(len(place)), np.where(missing, 0, place))
        segment, column = np.nonzero(~missing & (offset >= 0))
        publish = layout.published_states
        last = layout.publish[publish - layout.publish_start - 1]  # the token before each
        ends_in = np.searchsorted(layout.cu_seqlens_q, last, side="right") - 1
        last_inputs = tokens_at(ends_in, publish[:, None] + np.arange(-reach, 0))
        return cls(
            tails=StateExchange.of(resumed_at, publish, last_inputs, device),
            num_read=num_read,
            gather=Gather(to_device(tokens.reshape(-1), device, torch.int32), num_read + layout.num_tokens),
            missing=to_device(missing, device, torch.bool),
            fixed=to_device(tokens[segment, column] - num_read, device),
            place=to_device(segment * 2 * reach + column, device),
        )


def convolve(
    x: torch.Tensor,
    windows: Windows,
    convolution: Callable[[torch.Tensor], torch.Tensor],
    cache: CacheAccess | None = None,
    layer: int = 0,
) -> torch.Tensor:
    """Convolve (1, D, T) packed tokens, each within its own sequence.

    ``convolution`` maps (B, D, L) to (B, D, L), causal and padded with zeros.
    """
    if cache is not None:
        x_TD, _ = cache.exchange_states(CacheKey(layer, INPUTS), x.squeeze(0).transpose(0, 1), windows.tails)
        x = x_TD[windows.num_read :].transpose(0, 1).unsqueeze(0)
    plain = convolution(x)
    # Viewed after the convolution: autograd then adds this gradient first, and the sum gets its (T, D) strides. With
    # the convolution's (D, T) strides, the projection's backward takes six times as long if T is odd.
    if cache is None:
        x_TD = x.squeeze(0).transpose(0, 1)
    gathered = gather_tokens(x_TD, windows.gather)
    window_SLD = gathered.view(*windows.missing.shape, -1).masked_fill(windows.missing.unsqueeze(-1), 0.0)
    edges_KD = convolution(window_SLD.transpose(1, 2)).transpose(1, 2).flatten(0, 1)
    return plain.index_copy(2, windows.fixed, edges_KD.index_select(0, windows.place).T.unsqueeze(0))


def plain_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Replace the package causal-conv1d; weight (D, W). As in transformers, any activation is SiLU."""
    if x.is_cuda:  # fla's is faster and rounds once, after the activation
        from fla.modules.convolution import causal_conv1d

        out, _ = causal_conv1d(x.transpose(1, 2), weight, bias, activation=None if activation is None else "silu")
        return out.transpose(1, 2)
    out = F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[1])
    return out if activation is None else F.silu(out)
