"""A mixer in twenty lines: the short convolutions between attention layers of LFM2."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.lfm2.modeling_lfm2 import Lfm2DecoderLayer, Lfm2ShortConv

from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.mixers import Mixer


def tokens_before(layout: PackedLayout, width: int) -> torch.Tensor:
    """(T, width) indices of a token and those before it in its sequences; T where there is none."""
    segment = np.repeat(np.arange(len(layout.segment_start)), np.diff(layout.cu_seqlens_q))
    place = layout.position_ids[:, None] - np.arange(width)
    keys = layout.cu_seqlens_k[segment][:, None] + np.maximum(place, 0)
    return torch.from_numpy(np.where(place >= 0, layout.kv_index[keys], layout.num_tokens).astype(np.int64))


@torch.compiler.disable
def enter_layer(layer: Lfm2DecoderLayer, args: tuple, kwargs: dict[str, Any]) -> None:
    layer.conv.context = kwargs["prefix_grouper"]


@torch.compiler.disable  # index maps differ in every micro-batch
def over_packed_tokens(layer: Lfm2ShortConv, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    before, after, x = layer.in_proj(hidden_states).chunk(3, dim=-1)
    index_TW = layer.context.index(tokens_before, layer.conv.weight.shape[-1])
    with_zero = nn.functional.pad((before * x).squeeze(0), (0, 0, 0, 1))
    convolved = (with_zero[index_TW] * layer.conv.weight.squeeze(1).flip(-1).T).sum(1)
    return layer.context.mixed(CONVOLUTION.name, layer.out_proj(after * convolved))


def install(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, Lfm2DecoderLayer) and not layer.is_attention_layer:
            layer.register_forward_pre_hook(enter_layer, with_kwargs=True)
            layer.conv.forward = partial(over_packed_tokens, layer.conv)


CONVOLUTION = Mixer(
    "convolution", layer_types=frozenset({"conv"}), install=install, stateful_model_types=frozenset({"lfm2"})
)
