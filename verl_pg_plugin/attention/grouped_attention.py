"""One attention function for every kind of ``prefix_grouper`` that a model can be given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from verl.utils.attention_utils import pad_input, unpad_input

from verl_pg_plugin.attention.interface import kernel_options, packed_attention_forward
from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.attention.packed_attention import CallCounter, PackedAttention
from verl_pg_plugin.attention.ulysses import UlyssesAttention, ulysses_attention_forward

if TYPE_CHECKING:
    from prefix_grouper import PrefixGrouper


@dataclass(frozen=True)
class PaddedGroups:
    """Upstream's padded groups and the kernel that both of its attention passes call.

    Attributes:
        grouper: ``prefix_grouper.PrefixGrouper`` of rows ``[prompt | response 1 | response 2 | ... | padding]``.
        kernel: the varlen kernel to call.
        calls: counts the layers that attended, see ``PackedAttention``.
    """

    grouper: PrefixGrouper
    kernel: VarlenKernel
    calls: CallCounter = field(default_factory=CallCounter)


@dataclass(frozen=True)
class UnsharedSegments:
    """Packed rows of sequences that share nothing: ordinary varlen attention, no row is copied.

    Attributes:
        kernel: the varlen kernel to call.
        cu_seqlens: (S+1,) int32 bounds of the sequences.
        max_seqlen: longest sequence, in rows.
    """

    kernel: VarlenKernel
    cu_seqlens: torch.Tensor
    max_seqlen: int


class OpaqueGrouping:
    """A grouping that ``torch.compile`` does not look into.

    torch 2.11 takes frozen dataclasses apart where compiled code hands them on, and would compile anew for every size
    of the tensors inside.
    """

    def __init__(self, grouping: Grouping) -> None:
        self.grouping = grouping


Grouping: TypeAlias = "PackedAttention | UnsharedSegments | UlyssesAttention | PaddedGroups"
"""What attention layers are handed as ``prefix_grouper``."""


@torch.compiler.disable  # compiled layers call it as it is: its index maps differ in every micro-batch
def grouped_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefix_grouper: Grouping | OpaqueGrouping | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed or grouped rows, with the signature of transformers' attention functions.

    Args:
        query: (B, H, T, D); key, value: (B, G, T, D); B is 1 unless the rows are padded groups.
        attention_mask: must be None, ``prefix_grouper`` says what a row sees.
        kwargs: see ``kernel_options``.

    Returns:
        (B, T, H, D) and None for the attention weights.

    Raises:
        TypeError: ``prefix_grouper`` is of another type.
        RuntimeError: no ``prefix_grouper``, an attention mask, or something that the kernels do not compute, such as
            dropout or sinks.
    """
    if isinstance(prefix_grouper, OpaqueGrouping):
        prefix_grouper = prefix_grouper.grouping
    if prefix_grouper is None or isinstance(prefix_grouper, PackedAttention):
        return packed_attention_forward(
            module, query, key, value, attention_mask, prefix_grouper=prefix_grouper, **kwargs
        )
    if isinstance(prefix_grouper, UlyssesAttention):
        return ulysses_attention_forward(
            module, query, key, value, attention_mask, prefix_grouper, attend=grouped_attention_forward, **kwargs
        )
    options = kernel_options(module, query, attention_mask, **kwargs)
    if isinstance(prefix_grouper, UnsharedSegments):
        return _unshared_segments(query, key, value, prefix_grouper, options), None
    if isinstance(prefix_grouper, PaddedGroups):
        return _padded_groups(query, key, value, prefix_grouper, options), None
    raise TypeError(
        f"attention cannot use a prefix_grouper of type {type(prefix_grouper).__qualname__}; pass a PrefixGrouper or "
        "a PackedLayout to the model's forward, or a PackedAttention whose rows are the input"
    )


def _unshared_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: UnsharedSegments, options: dict[str, Any]
) -> torch.Tensor:
    q_THD, k_TGD, v_TGD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    bounds, longest = segments.cu_seqlens, segments.max_seqlen
    return segments.kernel.attend(q_THD, k_TGD, v_TGD, bounds, bounds, longest, longest, **options).unsqueeze(0)


def _padded_groups(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: PaddedGroups, options: dict[str, Any]
) -> torch.Tensor:
    """Upstream's two passes: prefixes among themselves, then each response over its prefix and itself."""
    groups.calls.add()

    def attend(q_BHQD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, mask_BK: torch.Tensor) -> torch.Tensor:
        # Upstream puts the queries at the end of their keys.
        batch_size, num_q = q_BHQD.shape[0], q_BHQD.shape[2]
        q_THD, rows, cu_seqlens_q, max_seqlen_q, *_ = unpad_input(q_BHQD.transpose(1, 2), mask_BK[:, -num_q:])
        k_TGD, _, cu_seqlens_k, max_seqlen_k, *_ = unpad_input(k_BGKD.transpose(1, 2), mask_BK)
        v_TGD, *_ = unpad_input(v_BGKD.transpose(1, 2), mask_BK)
        if not len(q_THD):  # no group of the batch has a prefix
            return q_BHQD.transpose(1, 2)
        # A group without a prefix is no segment; every suffix has rows.
        cu_seqlens_q, cu_seqlens_k = (torch.unique_consecutive(bounds) for bounds in (cu_seqlens_q, cu_seqlens_k))
        out_THD = groups.kernel.attend(
            q_THD, k_TGD, v_TGD, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
        )
        return pad_input(out_THD, rows, batch_size, num_q)

    return groups.grouper.forward(attend, query, key, value)
