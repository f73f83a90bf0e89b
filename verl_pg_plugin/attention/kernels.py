"""Causal variable-length attention kernels behind one signature, chosen once with a reason.

Every kernel takes flash-attn's arguments in flash-attn's order and aligns the causal mask bottom-right, so the
last query of a segment sees all of its keys. Shape legend: T query rows, K key rows, H query heads, G key/value
heads, D head dim, S segments.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

KERNEL_NAMES = ("flash_attn_2", "sdpa")
"""Kernels that can be asked for by name; "auto" picks the first that fits the device."""


class VarlenAttention(Protocol):
    """Attention of S segments packed along the first dimension.

    Args:
        q_THD, k_KGD, v_KGD: queries, keys and values; H is a multiple of G.
        cu_seqlens_q, cu_seqlens_k: (S+1,) int32 on the device of ``q_THD``.
        max_seqlen_q, max_seqlen_k: longest segment, in rows.
        softmax_scale: multiplies the scores.
        window_size: keys a query sees besides itself, to the left; -1 for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 switches it off.

    Returns:
        (T, H, D), dtype of ``q_THD``.
    """

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_KGD: torch.Tensor,
        v_KGD: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        window_size: int = -1,
        softcap: float = 0.0,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class VarlenKernel:
    """A kernel and why it was chosen."""

    name: str
    reason: str
    attend: VarlenAttention


def select_kernel(name: str, device_type: str) -> VarlenKernel:
    """Choose the attention kernel of this process.

    Args:
        name: "auto" or one of ``KERNEL_NAMES``.
        device_type: "cuda" or "cpu".

    Raises:
        ValueError: unknown name.
        RuntimeError: the kernel is not installed or cannot run on the device; the message names the fix.
    """
    loaders: dict[str, Callable[[], VarlenAttention]] = {
        "flash_attn_2": _load_flash_attn_2,
        "sdpa": lambda: attend_sdpa,
    }
    if name == "auto":
        chosen = "flash_attn_2" if device_type == "cuda" else "sdpa"
        reason = f"prefix_grouper.attention_kernel=auto on device {device_type}"
    elif name in loaders:
        chosen, reason = name, f"prefix_grouper.attention_kernel={name}"
    else:
        raise ValueError(f"unknown attention kernel {name!r}; choose auto or one of {', '.join(KERNEL_NAMES)}")
    if chosen == "flash_attn_2" and device_type != "cuda":
        raise RuntimeError(
            f"attention kernel flash_attn_2 needs a CUDA device, this is {device_type}; "
            "set prefix_grouper.attention_kernel=auto"
        )
    return VarlenKernel(name=chosen, reason=reason, attend=loaders[chosen]())


def _load_flash_attn_2() -> VarlenAttention:
    if importlib.util.find_spec("flash_attn") is None:
        raise RuntimeError(
            "packed mode on a GPU needs flash-attn, which is not installed: pip install 'verl-pg-plugin[gpu]', "
            "or set prefix_grouper.attention_kernel=sdpa (slow)"
        )
    from verl_pg_plugin.attention.flash_attn_2 import attend_flash_attn_2

    return attend_flash_attn_2


def attend_sdpa(
    q_THD: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    window_size: int = -1,
    softcap: float = 0.0,
) -> torch.Tensor:
    """``VarlenAttention`` as one torch SDPA call per segment: exact on every device and dtype."""
    if softcap:
        raise NotImplementedError("softcap needs prefix_grouper.attention_kernel=flash_attn_2")
    # Splitting joins the gradients of all pieces once; slices would each allocate one of full size.
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    pieces = zip(q_THD.split(lengths_q), k_KGD.split(lengths_k), v_KGD.split(lengths_k), strict=True)
    outputs = []
    for q_LHD, k_LGD, v_LGD in pieces:
        q_HLD, k_GLD, v_GLD = q_LHD.transpose(0, 1), k_LGD.transpose(0, 1), v_LGD.transpose(0, 1)
        num_q, num_k = q_HLD.shape[1], k_GLD.shape[1]
        square = num_q == num_k and window_size < 0
        out_1HLD = F.scaled_dot_product_attention(
            q_HLD.unsqueeze(0),
            k_GLD.unsqueeze(0),
            v_GLD.unsqueeze(0),
            attn_mask=None if square else _causal_mask(num_q, num_k, window_size, q_THD.device),
            is_causal=square,
            scale=softmax_scale,
            enable_gqa=q_THD.shape[1] != k_KGD.shape[1],
        )
        outputs.append(out_1HLD.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _causal_mask(num_q: int, num_k: int, window_size: int, device: torch.device) -> torch.Tensor:
    """(num_q, num_k) bool, True where a query sees a key; the last query is aligned with the last key."""
    distance = torch.arange(num_k - num_q, num_k, device=device)[:, None] - torch.arange(num_k, device=device)
    mask = distance >= 0
    return mask & (distance <= window_size) if window_size >= 0 else mask
