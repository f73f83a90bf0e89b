"""Packed attention as an entry of transformers' ``AttentionInterface``.

A model whose config selects it calls it in every layer with the keywords of the model's ``forward``, among them the
context ``prefix_grouper``. No model file is patched.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from verl_pg_plugin.attention.context import ForwardContext
from verl_pg_plugin.attention.op import AttentionOptions
from verl_pg_plugin.issue import SHARING_OFF

ATTENTION_NAME = "prefix_grouper_packed"
ATTENTION = "attention"

# Keywords without effect on attention: positions are applied to q and k; caches, outputs and losses are elsewhere.
_OUTPUTS = {"output_attentions", "output_hidden_states", "output_router_logits"}
WITHOUT_EFFECT = _OUTPUTS | {"position_ids", "position_embeddings", "use_cache", "cache_position", "num_items_in_batch"}


@torch.compiler.disable  # index arrays differ between micro-batches
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    prefix_grouper: ForwardContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute packed attention; the signature is that of transformers' attention functions.

    Takes (B, H, T, D) queries, (B, G, T, D) keys and values and (H,) sinks ``s_aux``; B is 1, except for padded groups.
    Returns (B, T, H, D), and None for the attention weights. RuntimeError without ``prefix_grouper``, or for arguments
    that the kernels do not support (mask, dropout, bias, bidirectional attention).
    """
    if prefix_grouper is None:
        raise RuntimeError(
            f"{_where(module)} runs with attention {ATTENTION_NAME!r} but got no layout: this architecture does not "
            f"pass keyword arguments down to its attention. Fix: {SHARING_OFF}"
        )
    unsupported = [name for name, setting in kwargs.items() if setting is not None and name not in WITHOUT_EFFECT]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if dropout:
        unsupported.append(f"attention dropout {dropout}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        unsupported.append("bidirectional attention")
    if unsupported:
        raise RuntimeError(
            f"{_where(module)} needs {', '.join(sorted(unsupported))}, which packed attention does not compute. "
            f"Fix: {SHARING_OFF}"
        )
    options = AttentionOptions(
        softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window_size=-1 if sliding_window is None else sliding_window - 1,  # transformers counts the query itself
        softcap=softcap or 0.0,
        layer_idx=getattr(module, "layer_idx", 0),
        sinks=s_aux,
    )
    return prefix_grouper.mixed(ATTENTION, prefix_grouper.attend(query, key, value, options)), None


def _where(module: nn.Module) -> str:
    return f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"


AttentionInterface.register(ATTENTION_NAME, packed_attention)
