"""Model classes of a user, as ``model.external_lib`` registers them: Qwen3 with one peculiarity each."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
