"""Stock transformers classes, told only the name of the attention, give each sequence the logits it has alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.layout.tries import batch_of, sequence_rows
from tests.support import save_tiny_model
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.interface import ATTENTION, ATTENTION_NAME, register_attention
from verl_pg_plugin.attention.kernels import select_kernel

PROMPT = tuple(range(30, 51))
BATCH = batch_of(
    (PROMPT, (1, 2, 3, 4, 5, 6, 7)),
    (PROMPT, (8,)),
    ((9, 10), (11, 12)),
    (PROMPT, (1, 2, 13, 14)),
    ((*PROMPT, 1, 2, 3), (15, 16, 17)),
    ((5,), (6, 7, 8)),
)
LAYOUT = BATCH.layout()
WINDOW = 6  # smaller than the prompt, and wider than some responses
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mistral-window": {"sliding_window": WINDOW},
}


def load(path: str | Path, attention: str) -> transformers.PreTrainedModel:
    # Eager attention would take its softmax in float32 whatever the model's dtype.
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation=attention)


def packed_logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    """(T, V) logits of the packed tokens."""
    attention = PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"))
    output = model(
        input_ids=torch.from_numpy(LAYOUT.input_ids).unsqueeze(0),
        position_ids=torch.from_numpy(LAYOUT.position_ids).unsqueeze(0),
        attention_mask=None,
        use_cache=False,
        prefix_grouper=attention,
    )
    assert attention.calls[ATTENTION] == model.config.num_hidden_layers
    return output.logits.squeeze(0)


def response_loss(logits_LV: torch.Tensor, tokens: tuple[int, ...], prompt: int) -> torch.Tensor:
    """Weighted log-probs of the response, from logits of all tokens but the last."""
    labels = torch.tensor(tokens[1:])
    log_probs = logits_LV.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    weights = torch.randn(len(labels), generator=torch.Generator().manual_seed(len(tokens)), dtype=torch.float64)
    return -(log_probs * weights)[prompt - 1 :].sum()


@pytest.mark.parametrize("name", MODELS)
def test_every_token_gets_the_logits_and_every_parameter_the_gradient_of_the_sequences_alone(
    name: str, tmp_path: Path
) -> None:
    register_attention()
    path = save_tiny_model(tmp_path, name.split("-")[0], **MODELS[name])
    packed, stock = load(path, ATTENTION_NAME), load(path, "sdpa")
    logits, losses = packed_logits(packed), torch.zeros(2, dtype=torch.float64)
    for tokens, prompt in zip(BATCH.sequences, BATCH.prompt_lengths, strict=True):
        actual = logits[sequence_rows(LAYOUT, tokens)]
        expected = stock(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        losses = losses + torch.stack([response_loss(x, tokens, prompt) for x in (actual, expected)])
    losses.sum().backward()
    for (parameter, got), want in zip(packed.named_parameters(), stock.parameters(), strict=True):
        # transformers' norms and rotary embedding compute in float32 whatever the model's dtype
        error = (got.grad - want.grad).abs().max() / want.grad.abs().max()
        assert error <= 1e-6, f"{parameter}: off by {error:.2g}"
