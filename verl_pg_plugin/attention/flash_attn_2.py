"""flash-attn 2 as a ``VarlenAttention``; imported only where flash-attn is installed."""

import os

import torch
from flash_attn import flash_attn_varlen_func


def attend_flash_attn_2(
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
    """Deterministic backward when FLASH_ATTENTION_DETERMINISTIC=1, as transformers and verl read it.

    float32 inputs under autocast (norms kept in float32) are cast to the autocast dtype, as transformers does.
    """
    if q_THD.dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q_THD, k_KGD, v_KGD = q_THD.to(dtype), k_KGD.to(dtype), v_KGD.to(dtype)
    return flash_attn_varlen_func(
        q_THD,
        k_KGD,
        v_KGD,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=True,
        window_size=(window_size, 0) if window_size >= 0 else (-1, -1),
        softcap=softcap,
        deterministic=os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1",
    )
