"""torch SDPA, one call per segment, as a ``VarlenAttention``: exact on every device and dtype, slow on a GPU."""

import torch
import torch.nn.functional as F

from verl_pg_plugin.attention.kernels.sinks import attend_with_sinks


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
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Any floating dtype and head dim; sinks on a CPU.

    Raises:
        NotImplementedError: the model caps its scores.
    """
    if softcap:
        raise NotImplementedError("softcap needs ++prefix_grouper.attention_kernel=flash_attn_2")
    # Splitting joins the gradients of all pieces once; slices would each allocate one of full size.
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    pieces = zip(q_THD.split(lengths_q), k_KGD.split(lengths_k), v_KGD.split(lengths_k), strict=True)
    outputs = []
    for q_LHD, k_LGD, v_LGD in pieces:
        q_HLD, k_GLD, v_GLD = q_LHD.transpose(0, 1), k_LGD.transpose(0, 1), v_LGD.transpose(0, 1)
        num_q, num_k = q_HLD.shape[1], k_GLD.shape[1]
        square = num_q == num_k and window_size < 0
        mask = None if square else _causal_mask(num_q, num_k, window_size, q_THD.device)
        if sinks_H is not None:
            out_HLD = attend_with_sinks(q_HLD, k_GLD, v_GLD, sinks_H, mask, softmax_scale)
            outputs.append(out_HLD.transpose(0, 1))
            continue
        out_1HLD = F.scaled_dot_product_attention(
            q_HLD.unsqueeze(0),
            k_GLD.unsqueeze(0),
            v_GLD.unsqueeze(0),
            attn_mask=mask,
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
