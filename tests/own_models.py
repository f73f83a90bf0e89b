"""Model classes of a user, as ``model.external_lib`` registers them: Qwen3 with one peculiarity each."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from tests.support import TINY


class OwnConfig(Qwen3Config):
    model_type = "own_of_tests"


class OwnForCausalLM(Qwen3ForCausalLM):
    """Qwen3 under another name."""

    config_class = OwnConfig


class LinspaceForCausalLM(OwnForCausalLM):
    """Reads numbers of ``torch.linspace`` as it is built, which works under ``from_pretrained`` alone."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        rates = torch.linspace(0, 1, config.num_hidden_layers)
        self.rates = [rate.item() for rate in rates], np.asarray(rates)


class WeightReadForCausalLM(OwnForCausalLM):
    """Reads a weight as it is built, which works in no model without storage."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.first = self.lm_head.weight[0, 0].item()


class UnnamedExpertsForCausalLM(OwnForCausalLM):
    """Its config does not say how many experts a token visits."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OneExpert(layer.mlp)


class OwnTableForCausalLM(OwnForCausalLM):
    """Looks its attention up as remote code of transformers 4 does."""

    def __init__(self, config: OwnConfig) -> None:
        self.attention = {"eager": nn.Identity, "sdpa": nn.Identity}[config._attn_implementation]
        super().__init__(config)


class TableInForwardAttention(Qwen3Attention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        {"eager": nn.Identity, "sdpa": nn.Identity}[self.config._attn_implementation]()
        return super().forward(*args, **kwargs)


class NoKeywordsAttention(Qwen3Attention):
    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, position_ids: Any,
        past_key_values: Any, use_cache: bool | None = None,
    ) -> Any:  # fmt: skip
        return super().forward(hidden_states, position_embeddings, attention_mask)


class TableInForwardForCausalLM(OwnForCausalLM):
    attention: type[Qwen3Attention] = TableInForwardAttention

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = self.attention(config, index)


class NoKeywordsInAttentionForCausalLM(TableInForwardForCausalLM):
    attention = NoKeywordsAttention


class NoKeywordsForCausalLM(OwnForCausalLM):
    """Takes what it knows, and nothing for its attention."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> Any:
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        return super().forward(input_ids, logits_to_keep=logits_to_keep, **given)


class OwnDecoder(Qwen3Model):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        return super().forward(input_ids, position_ids=position_ids)


class NoKeywordsInDecoderForCausalLM(OwnForCausalLM):
    """Its decoder takes nothing for attention."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.model = OwnDecoder(config)


class OneExpert(nn.Module):
    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([expert])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts[0](hidden)


def register_own(model_class: type[OwnForCausalLM]) -> OwnConfig:
    """Let transformers build this class for the type; return a tiny config of it."""
    AutoConfig.register(OwnConfig.model_type, OwnConfig, exist_ok=True)
    AutoModelForCausalLM.register(OwnConfig, model_class, exist_ok=True)
    return OwnConfig(**TINY, architectures=[model_class.__name__])


def save_own(folder: Path, model_class: type[OwnForCausalLM], **fields: Any) -> str:
    """A tiny checkpoint that loads this class."""
    config = register_own(model_class)
    torch.manual_seed(0)
    model_class._from_config(config, dtype=torch.float32, **fields).save_pretrained(folder)
    return str(folder)
