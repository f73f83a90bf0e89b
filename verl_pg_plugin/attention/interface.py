"""Attention over shared prefixes under a name in transformers' ``AttentionInterface``.

A model whose config names this implementation calls it in every layer and hands through the keyword arguments
of its ``forward``; the layout travels as ``prefix_grouper``. No model file is patched.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from verl_pg_plugin.attention.packed_attention import PackedAttention, packed_attention

ATTENTION_NAME = "prefix_grouper_packed"

# Keywords that decoders pass and that change nothing here: positions are in q and k already, the rest concerns
# caches, outputs and masks that a packed forward does not have.
_WITHOUT_EFFECT = frozenset({"position_ids", "position_embeddings", "use_cache", "cache_position", "output_attentions"})


def kernel_options(
    module: nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Keywords of a ``VarlenAttention`` from those of transformers' attention functions.

    Args:
        query: (B, H, T, D); its D gives the default scaling.
        attention_mask: must be None, the layout says what a row sees.
        sliding_window: tokens a query sees, itself included, as transformers counts them.

    Raises:
        RuntimeError: the model needs what the kernels do not compute (a mask, dropout, sinks, biases, non-causal
            layers).
    """
    unsupported = [name for name, setting in kwargs.items() if setting is not None and name not in _WITHOUT_EFFECT]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if dropout:
        unsupported.append(f"attention dropout {dropout}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        unsupported.append("bidirectional attention")
    if unsupported:
        raise RuntimeError(
            f"{_where(module)} asks for {', '.join(sorted(unsupported))}, which packed attention does not compute; "
            "set actor_rollout_ref.actor.use_prefix_grouper=False"
        )
    return {
        "softmax_scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window_size": -1 if sliding_window is None else sliding_window - 1,
        "softcap": softcap or 0.0,
    }


def packed_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefix_grouper: PackedAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``packed_attention`` with the signature of transformers' attention functions.

    Args:
        query: (1, H, T, D); key, value: (1, G, T, D).
        prefix_grouper: the state made by the engine for this forward.
        kwargs: see ``kernel_options``.

    Returns:
        (1, T, H, D) and None for the attention weights.

    Raises:
        RuntimeError: called without a layout, or see ``kernel_options``.
    """
    if prefix_grouper is None:
        raise RuntimeError(
            f"{_where(module)} runs with attention {ATTENTION_NAME!r} but got no layout: this architecture does not "
            "pass keyword arguments down to its attention; set actor_rollout_ref.actor.use_prefix_grouper=False"
        )
    options = kernel_options(module, query, attention_mask, **kwargs)
    q_THD, k_TGD, v_TGD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return packed_attention(q_THD, k_TGD, v_TGD, prefix_grouper, **options).unsqueeze(0), None


def _where(module: nn.Module) -> str:
    return f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"


def register_attention() -> None:
    """Make ``ATTENTION_NAME`` a valid ``attn_implementation``; calling it again changes nothing."""
    from verl_pg_plugin.attention.grouped_attention import grouped_attention_forward  # it imports this module

    AttentionInterface.register(ATTENTION_NAME, grouped_attention_forward)
