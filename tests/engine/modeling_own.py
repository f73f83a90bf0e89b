"""A custom model class: transformers' Qwen3 that mixes neighbouring tokens without attention.

Copied next to a checkpoint for ``trust_remote_code``; ``config.mixing`` selects the operation.
"""

from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

MIXINGS = ("ngrams", "shift")


def token_before(x: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    """(B, T, ...) shifted by one token, zero for the first token of a sequence."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    if starts is not None:
        before[:, starts[:-1]] = 0
    return before


class NGrams(qwen3.nn.Embedding):
    """Embeds each token, and its pair with the previous token."""

    starts: torch.Tensor | None = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        pairs = (7 * input_ids + token_before(input_ids, self.starts)) % self.num_embeddings
        return super().forward(input_ids) + super().forward(pairs)


class MixingMLP(nn.Module):
    """Adds the token before to each token before a layer's MLP."""

    starts: torch.Tensor | None = None

    def __init__(self, mlp: nn.Module, config: Qwen3Config) -> None:
        super().__init__()
        self.mlp, self.tap = mlp, nn.Parameter(torch.randn(config.hidden_size) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.tap * token_before(x, self.starts))


class OwnForCausalLM(qwen3.Qwen3ForCausalLM):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        if config.mixing == "ngrams":
            self.model.embed_tokens = NGrams(config.vocab_size, config.hidden_size)
        elif config.mixing == "shift":
            self.model.layers[0].mlp = MixingMLP(self.model.layers[0].mlp, config)
        self.post_init()


class ByCuSeqlens(OwnForCausalLM):
    """Reads the starts of sequences, which stock verl passes to a ``forward`` with a parameter ``cu_seqlens``."""

    def forward(
        self, *args: Any, cu_seqlens: torch.Tensor | None = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> Any:
        for part in self.modules():
            if hasattr(part, "starts"):
                part.starts = cu_seqlens
        return super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
