"""Attention over a packed layout: for each segment, its rows attend to its ancestors' rows and their own."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from verl_pg_plugin.attention.gather import GatherIndex, gather_rows, to_device
from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.layout import PackedLayout


class CallCounter:
    """Counts calls; an object of its own so that copies of a ``PackedAttention`` keep one count."""

    def __init__(self) -> None:
        self.value = 0

    def add(self) -> None:
        self.value += 1


@dataclass(frozen=True)
class PackedAttention:
    """What every attention layer of one packed forward needs, on the device; handed to the model as a keyword.

    Attributes:
        kernel: the varlen kernel to call.
        num_rows: T; rows after them are padding, which attends to nothing.
        kv_index: gathers the keys and values of every segment; None where nothing is shared, so each row is a key
            of its own segment alone and copying would change nothing.
        cu_seqlens_q, cu_seqlens_k: (S+1,) int32.
        max_seqlen_q, max_seqlen_k: in rows.
        calls: counts the layers that went through ``packed_attention``; the engine compares it with the depth
            of the model, so a layer that attends by other means is an error and not a wrong number.
    """

    kernel: VarlenKernel
    num_rows: int
    kv_index: GatherIndex | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    calls: CallCounter = field(default_factory=CallCounter)

    @classmethod
    def from_layout(cls, layout: PackedLayout, kernel: VarlenKernel, device: torch.device | str) -> "PackedAttention":
        """Move the index maps of ``layout`` to ``device``, without waiting for the copies."""
        return cls(
            kernel=kernel,
            num_rows=layout.num_rows,
            kv_index=GatherIndex.from_layout(layout, device) if len(layout.kv_rows) > layout.num_rows else None,
            cu_seqlens_q=to_device(layout.cu_seqlens_q, torch.int32, device),
            cu_seqlens_k=to_device(layout.cu_seqlens_k, torch.int32, device),
            max_seqlen_q=layout.max_seqlen_q,
            max_seqlen_k=layout.max_seqlen_k,
        )


def packed_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedAttention,
    *,
    softmax_scale: float,
    window_size: int = -1,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of T packed rows in which siblings never see each other.

    Keys and values are gathered as ``[ancestors' rows | own rows]`` per segment, in the order of their
    positions, so the causal mask, sliding windows and softcap of an ordinary varlen kernel stay exact.

    Args:
        q_THD: (T, H, D) queries, rotary embedding applied; rows after ``packed.num_rows`` are padding.
        k_TGD, v_TGD: (T, G, D) keys and values of the same rows.
        packed: index maps and kernel.
        softmax_scale, window_size, softcap: see ``VarlenAttention``.

    Returns:
        (T, H, D), dtype of ``q_THD``; zero at padding rows.
    """
    packed.calls.add()
    shared = packed.kv_index
    num_padding = len(q_THD) - packed.num_rows
    if num_padding:
        q_THD, k_TGD, v_TGD = (x[: packed.num_rows] for x in (q_THD, k_TGD, v_TGD))
    out_THD = packed.kernel.attend(
        q_THD,
        k_TGD if shared is None else gather_rows(k_TGD, shared),
        v_TGD if shared is None else gather_rows(v_TGD, shared),
        packed.cu_seqlens_q,
        packed.cu_seqlens_k,
        packed.max_seqlen_q,
        packed.max_seqlen_k,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
    )
    return F.pad(out_THD, (0, 0, 0, 0, 0, num_padding)) if num_padding else out_THD
