"""What a model's ``forward`` is given, turned into what its trunk runs: packed rows, and the way back.

Shape legend: B sequences, S padded length, T packed rows, L rows of this rank, V width of the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from verl.utils.attention_utils import index_first_axis, pad_input, unpad_input
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
    ulysses_pad_and_slice_inputs,
)

from verl_pg_plugin.attention.context import AttentionContext, PackedAttention, PaddedGroupsAttention, UlyssesAttention
from verl_pg_plugin.attention.interface import ATTENTION_NAME
from verl_pg_plugin.attention.kernels import Kernel, select_kernel
from verl_pg_plugin.layout import PackedLayout

if TYPE_CHECKING:
    from prefix_grouper import PrefixGrouper

NO_MASK: dict[str, None] = {"full_attention": None, "sliding_attention": None}
"""Masks by layer type, as a transformers trunk takes them ready-made: none, ``prefix_grouper`` says what is seen."""

KERNEL_OF_IMPLEMENTATION = {
    "flash_attention_2": "flash_attn_2",
    "sdpa": "sdpa",
    "eager": "sdpa",
    ATTENTION_NAME: "auto",
}
"""Varlen kernel for packed rows by the ``attn_implementation`` that the model was loaded with."""


@dataclass(frozen=True)
class TrunkInputs:
    """Inputs of a trunk and how its output returns to the caller's positions.

    Attributes:
        input_ids: (1, L) packed rows, or what the caller passed where nothing is packed.
        position_ids: the same shape.
        attention_mask: for the trunk; ``NO_MASK`` where ``prefix_grouper`` takes its place.
        prefix_grouper: for the attention layers; None runs transformers' own attention.
        padded_rows: (T,) places of the rows in the caller's flattened (B, S); None if they were packed already.
        padded_shape: (B, S), used with ``padded_rows``.
        num_sp_padding: rows appended so that the sequence-parallel ranks hold equally many; None if the rows were
            not spread over ranks here.
    """

    input_ids: torch.Tensor | None
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | dict | None = None
    prefix_grouper: AttentionContext | None = None
    padded_rows: torch.Tensor | None = None
    padded_shape: tuple[int, int] = (0, 0)
    num_sp_padding: int | None = None

    def restore(self, x_1LV: torch.Tensor) -> torch.Tensor:
        """Trunk or head output on the caller's positions: all ranks' rows, without the padding added here.

        Every rank gets the whole result and computes the same loss from it. verl's gather scales the gradient by
        the number of ranks, for parameter gradients that are averaged over them, as FSDP does.

        Returns:
            (B, S, V), zero where the caller's mask is; (1, T, V) if the caller packed the rows.
        """
        if self.num_sp_padding is not None:
            x_1LV = gather_outputs_and_unpad(x_1LV, gather_dim=1, unpad_dim=1, padding_size=self.num_sp_padding)
        if self.padded_rows is not None:
            return pad_input(x_1LV.squeeze(0), self.padded_rows, *self.padded_shape)
        return x_1LV


def pack_padded(
    config: PretrainedConfig,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None,
) -> TrunkInputs:
    """Drop the padding: every sequence becomes one segment of packed rows, prefixes are not shared.

    Args:
        config: of the model; its attention implementation selects the kernel.
        input_ids: (B, S) padded on the left, the right or both sides.
        attention_mask: (B, S), 1 at valid tokens. A row without any gives zeros and no gradient.
        position_ids: (B, S) or (1, S); None counts the valid tokens of each sequence from 0.

    Raises:
        ValueError: shapes differ, valid tokens of a row are not consecutive, or there are none at all.
    """
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)} differ")
    mask = attention_mask.bool()
    if (F.pad(mask.int(), (1, 0)).diff(dim=1) > 0).sum(dim=1).max() > 1:
        raise ValueError(
            "attention_mask has holes: the valid tokens of a row must be consecutive; pad on the left or the right only"
        )
    if not mask.any():
        raise ValueError("attention_mask masks every token of the batch: there is nothing to compute")
    if position_ids is None:
        position_ids = mask.long().cumsum(dim=1) - 1
    elif position_ids.shape not in (input_ids.shape, (1, input_ids.shape[1])):
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} must have the shape of input_ids {tuple(input_ids.shape)}, or 1 "
            "in place of the batch size; leave them out to count the valid tokens"
        )
    rows, indices, cu_seqlens, max_seqlen, *_ = unpad_input(input_ids.unsqueeze(-1), mask)
    positions = index_first_axis(position_ids.expand_as(input_ids).reshape(-1, 1), indices)
    cu_seqlens = torch.unique_consecutive(cu_seqlens)  # a row of padding is no segment
    segments = PackedAttention.unshared(kernel_of(config, input_ids.device), cu_seqlens, int(max_seqlen), len(rows))
    batch_size, seqlen = input_ids.shape
    return _over_ranks(rows.T, positions.T, segments, indices, (batch_size, seqlen))


def use_layout(
    config: PretrainedConfig, input_ids: torch.Tensor, position_ids: torch.Tensor | None, layout: PackedLayout
) -> TrunkInputs:
    """Rows of a layout; ``position_ids`` (1, T) default to the layout's.

    Raises:
        ValueError: ``input_ids`` or ``position_ids`` are not the layout's rows.
    """
    for name, rows in (("input_ids", input_ids), ("position_ids", position_ids)):
        if rows is not None and rows.shape != (1, layout.num_rows):
            raise ValueError(f"prefix_grouper lays out {layout.num_rows} rows, but {name} is {tuple(rows.shape)}")
    if position_ids is None:
        position_ids = torch.from_numpy(layout.position_ids).to(input_ids.device).unsqueeze(0)
    packed = PackedAttention(layout, kernel_of(config, input_ids.device), input_ids.device)
    return _over_ranks(input_ids, position_ids, packed)


def use_padded_groups(
    config: PretrainedConfig,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    grouper: PrefixGrouper,
) -> TrunkInputs:
    """Rows ``[prompt | response 1 | ... | padding]`` of upstream's grouper, one group a row, (B, S).

    Raises:
        ValueError: the groups do not match the batch, no positions, or sequence parallelism is on.
    """
    padding_mask = grouper.padding_mask
    if input_ids.shape != padding_mask.shape:
        raise ValueError(
            f"prefix_grouper describes {padding_mask.shape[0]} groups of up to {padding_mask.shape[1]} tokens, but "
            f"input_ids is {tuple(input_ids.shape)}; build input_ids with prefix_grouper.concat_input"
        )
    if attention_mask is not None and not torch.equal(attention_mask.bool(), padding_mask.to(attention_mask.device)):
        raise ValueError("attention_mask differs from prefix_grouper.padding_mask: group sizes do not match the batch")
    if position_ids is None or position_ids.shape != input_ids.shape:
        raise ValueError(
            "a PrefixGrouper needs position_ids of the shape of input_ids, in which every response continues its "
            "prompt; verl.trainer.ppo.prefix_grouper_utils.build_position_ids_for_prefix_grouper makes them"
        )
    if get_ulysses_sequence_parallel_world_size() > 1:
        raise ValueError(
            "a PrefixGrouper's padded groups cannot be spread over a Ulysses group; pass a PackedLayout "
            "(use_remove_padding=True) or set ulysses_sequence_parallel_size=1"
        )
    groups = PaddedGroupsAttention(grouper, kernel_of(config, input_ids.device))
    return TrunkInputs(input_ids, position_ids, NO_MASK, groups)


def kernel_of(config: PretrainedConfig, device: torch.device) -> Kernel:
    """The varlen kernel that belongs to the model's attention implementation.

    Raises:
        ValueError: there is none.
    """
    implementation = config._attn_implementation
    if implementation not in KERNEL_OF_IMPLEMENTATION:
        raise ValueError(
            f"packed rows have no kernel for attn_implementation={implementation!r}; load the model with one of "
            f"{', '.join(KERNEL_OF_IMPLEMENTATION)}"
        )
    return _selected(KERNEL_OF_IMPLEMENTATION[implementation], device.type)


@cache
def _selected(name: str, device_type: str) -> Kernel:
    """Once, and not in every forward: selecting reads the metadata of packages."""
    return select_kernel(name, device_type)


def _over_ranks(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    inner: AttentionContext,
    padded_rows: torch.Tensor | None = None,
    padded_shape: tuple[int, int] = (0, 0),
) -> TrunkInputs:
    """Pad (1, T) rows to a multiple of verl's Ulysses group and keep this rank's slice, if there is a group."""
    sp_size = get_ulysses_sequence_parallel_world_size()
    if sp_size == 1:
        return TrunkInputs(input_ids, position_ids, NO_MASK, inner, padded_rows, padded_shape)
    shared = UlyssesAttention(inner, input_ids.shape[1], get_ulysses_sequence_parallel_group())
    input_ids, position_ids, num_sp_padding = ulysses_pad_and_slice_inputs(input_ids, position_ids, sp_size)
    return TrunkInputs(input_ids, position_ids, NO_MASK, shared, padded_rows, padded_shape, num_sp_padding)
