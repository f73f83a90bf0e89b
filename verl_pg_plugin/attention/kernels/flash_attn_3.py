"""flash-attn 3 (``hopper`` of flash-attention) as a ``VarlenAttention``; imported only where it is installed.

Called as https://github.com/Dao-AILab/flash-attention/blob/main/hopper/flash_attn_interface.py documents it.
"""

import flash_attn_interface
import torch

from verl_pg_plugin.attention.kernels.inputs import cast_under_autocast, deterministic_backward

# Its import registers operators, by one of which checkpointing finds attention's output.
if not any(hasattr(torch.ops.flash_attn_3, name) for name in ("_flash_attn_forward", "fwd")):
    raise ImportError(
        "flash_attn_interface registers neither flash_attn_3::_flash_attn_forward nor fwd; build a later one"
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
    """float16 and bfloat16; head dims that are multiples of 8 up to 256, as far as the build holds them."""
    q_THD, k_KGD, v_KGD = cast_under_autocast(q_THD, k_KGD, v_KGD)
    out = flash_attn_interface.flash_attn_varlen_func(
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
        deterministic=deterministic_backward(),
    )
    # Builds of before https://github.com/Dao-AILab/flash-attention/pull/1851 return the log-sum-exp too.
    return out[0] if isinstance(out, tuple) else out
