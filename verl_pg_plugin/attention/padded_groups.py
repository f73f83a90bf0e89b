"""Attention over upstream's padded groups (https://github.com/johncaged/PrefixGrouper)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from verl.utils.attention_utils import pad_input, unpad_input

from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.attention.shared_rows import AttentionOptions, SharedRows
from verl_pg_plugin.layout import PaddedLayout

if TYPE_CHECKING:
    from prefix_grouper import PrefixGrouper


class PaddedGroups(SharedRows):
    """One group a line, and the kernel that both of upstream's attention passes call.

    Attributes:
        grouper: ``prefix_grouper.PrefixGrouper`` of rows ``[prompt | response 1 | response 2 | ... | padding]``.
        kernel: the varlen kernel to call.
    """

    def __init__(self, grouper: PrefixGrouper, kernel: VarlenKernel, layout: PaddedLayout | None = None) -> None:
        super().__init__(layout)
        self.grouper = grouper
        self.kernel = kernel

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Upstream's two passes: prefixes among themselves, then each response over its prefix and itself."""

        def attend(
            q_BHQD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, mask_BK: torch.Tensor
        ) -> torch.Tensor:
            # Upstream puts the queries at the end of their keys.
            batch_size, num_q = q_BHQD.shape[0], q_BHQD.shape[2]
            q_THD, rows, cu_seqlens_q, max_seqlen_q, *_ = unpad_input(q_BHQD.transpose(1, 2), mask_BK[:, -num_q:])
            k_TGD, _, cu_seqlens_k, max_seqlen_k, *_ = unpad_input(k_BGKD.transpose(1, 2), mask_BK)
            v_TGD, *_ = unpad_input(v_BGKD.transpose(1, 2), mask_BK)
            if not len(q_THD):  # no group of the batch has a prefix
                return q_BHQD.transpose(1, 2)
            # A group without a prefix is no segment; every suffix has rows.
            cu_seqlens_q, cu_seqlens_k = (torch.unique_consecutive(bounds) for bounds in (cu_seqlens_q, cu_seqlens_k))
            out_THD = self.kernel(
                q_THD, k_TGD, v_TGD, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options.of_kernel
            )
            return pad_input(out_THD, rows, batch_size, num_q)

        return self.grouper.forward(attend, query, key, value)
