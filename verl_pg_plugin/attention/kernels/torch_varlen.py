"""torch's built-in varlen attention as a ``VarlenAttention``: the flash-attention 2 kernels inside torch >= 2.11.

Those align the causal mask bottom-right and take fewer key/value heads than query heads; softcap is compiled out.
"""

import inspect

import torch
from torch.nn.attention.varlen import varlen_attn

from verl_pg_plugin.attention.kernels.inputs import cast_under_autocast

# torch 2.11 infers grouped heads from the shapes; later versions want to be told.
_GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


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
    """float16 and bfloat16; head dims that are multiples of 8 up to 256.

    Raises:
        NotImplementedError: the model caps its scores.
        RuntimeError: a tensor has more elements than the kernel can address.
    """
    if softcap:
        raise NotImplementedError(
            "torch_varlen has no softcap; install flash-attn and set ++prefix_grouper.attention_kernel=flash_attn_2"
        )
    if max(q_THD.numel(), k_KGD.numel()) >= 2**31:
        # Measured on torch 2.11: one million rows of 32 heads x 128 gave garbage and no error.
        raise RuntimeError(
            f"torch_varlen cannot address {max(q_THD.numel(), k_KGD.numel())} elements; lower "
            "ppo_max_token_len_per_gpu, or install flash-attn and set ++prefix_grouper.attention_kernel=flash_attn_2"
        )
    q_THD, k_KGD, v_KGD = cast_under_autocast(q_THD, k_KGD, v_KGD)
    return varlen_attn(
        q_THD,
        k_KGD,
        v_KGD,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale=softmax_scale,
        window_size=(window_size, 0),
        **_GROUPED_HEADS,
    )
