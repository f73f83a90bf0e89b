"""flash-attn 4 (PyPI ``flash-attn-4``) as a ``VarlenAttention``; imported only where it is installed.

Its kernels are compiled when first called, once for each combination of head dim, heads, mask and dtype, which takes
minutes; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them on disk.
"""

import inspect

import torch
from flash_attn.cute import flash_attn_varlen_func

from verl_pg_plugin.attention.kernel_inputs import cast_under_autocast, deterministic_backward

# flash-attn 2.8 ships an early copy in the same folder, which has no such argument.
if "max_seqlen_k" not in inspect.signature(flash_attn_varlen_func).parameters:
    raise ImportError(
        "flash_attn/cute holds the copy that flash-attn 2 brings along; "
        "pip install --force-reinstall --no-deps --pre flash-attn-4"
    )


def attend(
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
    """float16 and bfloat16; head dims that are multiples of 8, up to 256 on Hopper, up to 128 and 256 on Blackwell."""
    q_THD, k_KGD, v_KGD = cast_under_autocast(q_THD, k_KGD, v_KGD)
    out_THD, _ = flash_attn_varlen_func(
        q_THD,
        k_KGD,
        v_KGD,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=True,
        window_size=(window_size, 0) if window_size >= 0 else (None, None),
        softcap=softcap,
        deterministic=deterministic_backward(),
    )
    return out_THD
