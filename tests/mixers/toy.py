"""A mixer in twenty lines, and a model that needs it: causal depthwise convolutions between attention layers."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from verl_pg_plugin.attention.context import AttentionContext
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.mixers import Mixer

WIDTH = 3


def rows_before(layout: PackedLayout) -> torch.Tensor:
    """(T, WIDTH) the row itself and those before it in its sequences; T where there is none."""
    segment = np.repeat(np.arange(len(layout.segment_start)), np.diff(layout.cu_seqlens_q))
    place = layout.key_place[:, None] - np.arange(WIDTH)
    keys = layout.cu_seqlens_k[segment][:, None] + np.maximum(place, 0)
    return torch.from_numpy(np.where(place >= 0, layout.kv_index[keys], layout.num_tokens).astype(np.int64))


def install(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, ToyConvolution):
            layer.forward = partial(over_packed_tokens, layer)


CONVOLUTION = Mixer(name="convolution", layer_types=frozenset({"conv"}), install=install)


@torch.compiler.disable  # index maps differ in every micro-batch
def over_packed_tokens(
    layer: "ToyConvolution", hidden_states: torch.Tensor, prefix_grouper: AttentionContext, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    before_TW = prefix_grouper.index(rows_before)
    with_zero = nn.functional.pad(hidden_states.squeeze(0), (0, 0, 0, 1))
    out = (with_zero[before_TW] * layer.weight).sum(1).unsqueeze(0)
    return prefix_grouper.mixed(CONVOLUTION.name, out), None


class ToyConvolution(nn.Module):
    """Sees the tokens of one unpadded sequence."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, hidden_size))

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        length = hidden_states.shape[1]
        shifted = [nn.functional.pad(hidden_states, (0, 0, w, 0))[:, :length] for w in range(WIDTH)]
        return (torch.stack(shifted, dim=2) * self.weight).sum(2), None


class ToyConfig(Qwen3Config):
    model_type = "toy_convolution"


class ToyModel(qwen3.Qwen3Model):
    def forward(self, input_ids: torch.Tensor, attention_mask: None = None, **kwargs: Any) -> Any:
        embeds = self.embed_tokens(input_ids)
        mask = None
        if kwargs.get("prefix_grouper") is None:
            mask = create_causal_mask(self.config, embeds, attention_mask, past_key_values=None)
        masks = {"full_attention": mask, "conv": None}
        kwargs.pop("inputs_embeds", None)
        return super().forward(input_ids=None, inputs_embeds=embeds, attention_mask=masks, **kwargs)


class ToyForCausalLM(qwen3.Qwen3ForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.model = ToyModel(config)
        for layer, layer_type in zip(self.model.layers, config.layer_types, strict=True):
            if layer_type == "conv":
                layer.self_attn = ToyConvolution(config.hidden_size)
        self.post_init()


def register() -> None:
    AutoConfig.register(ToyConfig.model_type, ToyConfig, exist_ok=True)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)


def save_toy_model(path: Path) -> str:
    from tests.support import save_tiny_model

    register()
    return save_tiny_model(
        path, ToyConfig.model_type, num_hidden_layers=3, layer_types=["full_attention", "conv", "full_attention"]
    )
