"""Attention over a packed layout: for each segment, its rows attend to its ancestors' rows and their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from verl_pg_plugin.attention.gather import GatherIndex, gather_rows
from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.attention.key_copies import Bounds, KeyCopies
from verl_pg_plugin.attention.shared_rows import AttentionOptions, SharedRows
from verl_pg_plugin.layout import PackedLayout


class PackedRows(SharedRows):
    """T packed rows of S segments on the device.

    Attributes:
        kernel: the varlen kernel to call.
        num_rows: T; rows after them are padding, which attends to nothing.
        bounds: of the segments and of their keys.
        copies: copies the keys and values of every segment; None where each row is a key of its own segment alone, so
            that copying would change nothing.
    """

    def __init__(
        self,
        kernel: VarlenKernel,
        num_rows: int,
        bounds: Bounds,
        copies: KeyCopies | None = None,
        layout: PackedLayout | None = None,
    ) -> None:
        super().__init__(layout)
        self.kernel = kernel
        self.num_rows = num_rows
        self.bounds = bounds
        self.copies = copies

    @classmethod
    def from_layout(cls, layout: PackedLayout, kernel: VarlenKernel, device: torch.device | str) -> PackedRows:
        """Move the index maps of ``layout`` to ``device``, without waiting for the copies."""
        copies = None
        if layout.num_gathered_kv:
            index = GatherIndex.from_layout(layout, device)
            has_backward = kernel.copies_keys and torch.is_grad_enabled()
            copies = KeyCopies.of(layout, index, device) if has_backward else KeyCopies(index)
        return cls(kernel, layout.num_tokens, Bounds.of(layout, device), copies, layout)

    @classmethod
    def unshared(cls, kernel: VarlenKernel, cu_seqlens: torch.Tensor, max_seqlen: int, num_rows: int) -> PackedRows:
        """Sequences that share nothing, bounded by ``cu_seqlens`` (S+1,) int32: ordinary varlen attention."""
        return cls(kernel, num_rows, Bounds(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))

    def rounded(self, out: torch.Tensor) -> torch.Tensor:
        return self.kernel.rounded(out)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        q_THD, k_TGD, v_TGD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return self.attend_packed(q_THD, k_TGD, v_TGD, options).unsqueeze(0)

    def attend_packed(
        self, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Causal attention of T packed rows in which siblings never see each other.

        Keys and values are gathered as ``[ancestors' rows | own rows]`` per segment, in the order of their
        positions, so the causal mask, sliding windows and softcap of an ordinary varlen kernel stay exact.

        Args:
            q_THD: (T, H, D) queries; rows after ``num_rows`` are padding.
            k_TGD, v_TGD: (T, G, D) keys and values of the same rows.

        Returns:
            (T, H, D), dtype of ``q_THD``; zero at padding rows.
        """
        num_padding = len(q_THD) - self.num_rows
        if num_padding:
            q_THD, k_TGD, v_TGD = (x[: self.num_rows] for x in (q_THD, k_TGD, v_TGD))
        k, v, copies = self.read(k_TGD, v_TGD, options)
        out_THD = self.kernel(
            q_THD,
            k,
            v,
            self.bounds.cu_seqlens_q,
            self.bounds.cu_seqlens_k,
            self.bounds.max_seqlen_q,
            self.bounds.max_seqlen_k,
            **options.of_kernel,
            **copies,
        )
        return F.pad(out_THD, (0, 0, 0, 0, 0, num_padding)) if num_padding else out_THD

    def read(
        self, k_TGD: torch.Tensor, v_TGD: torch.Tensor, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Keys and values for the kernel, from those of the rows, and how it copies them for itself.

        Where it does not, they are the (K, G, D) that the segments see.
        """
        if self.copies is None:
            return k_TGD, v_TGD, {}
        if self.kernel.copies_keys:
            return k_TGD, v_TGD, {"copies": self.copies}
        return gather_rows(k_TGD, self.copies.index), gather_rows(v_TGD, self.copies.index), {}
