"""Stock transformers classes, told only the name of the attention, give each sequence the logits it has alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.layout.tries import Batch, batch_of, sequence_rows
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
WINDOW = 6  # smaller than the prompt, and wider than some responses
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mistral-window": {"sliding_window": WINDOW},
}


@dataclass(frozen=True)
class Pair:
    """One checkpoint twice: with packed attention and as transformers runs it."""

    packed: transformers.PreTrainedModel
    stock: transformers.PreTrainedModel


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    register_attention()
    path = save_tiny_model(tmp_path_factory.mktemp(request.param), request.param.split("-")[0], **MODELS[request.param])
    return Pair(load(path, ATTENTION_NAME), load(path, "sdpa"))


def load(path: str | Path, attention: str) -> transformers.PreTrainedModel:
    # Eager attention would take its softmax in float32 whatever the model's dtype.
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation=attention)


def packed_logits(
    model: transformers.PreTrainedModel, batch: Batch, attention: PackedAttention | None = None, **options: Any
) -> torch.Tensor:
    """(T, V) logits of all rows, or of those that ``logits_to_keep`` names."""
    layout = batch.layout()
    attention = attention or attention_of(batch)
    output = model(
        input_ids=torch.from_numpy(layout.input_ids).unsqueeze(0),
        position_ids=torch.from_numpy(layout.position_ids).unsqueeze(0),
        attention_mask=None,
        use_cache=False,
        prefix_grouper=attention,
        **options,
    )
    assert attention.calls[ATTENTION] == model.config.num_hidden_layers
    return output.logits.squeeze(0)


def attention_of(batch: Batch) -> PackedAttention:
    return PackedAttention(batch.layout(), select_kernel("sdpa", "cpu"), "cpu")


def stock_logits(model: transformers.PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """(L, V) logits of one sequence alone, unpadded."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits.squeeze(0)


def response_loss_of_packed(
    model: transformers.PreTrainedModel, batch: Batch, attention: PackedAttention | None = None
) -> torch.Tensor:
    layout = batch.layout()
    head_index = torch.from_numpy(layout.head_index)
    log_p = packed_logits(model, batch, attention, logits_to_keep=head_index).log_softmax(-1)
    log_probs = log_p.gather(-1, torch.from_numpy(layout.labels)[head_index].unsqueeze(-1)).squeeze(-1)
    flat = torch.zeros(layout.num_logical_tokens, dtype=torch.float64)
    flat = flat.index_copy(
        0, torch.from_numpy(layout.response_index), log_probs[torch.from_numpy(layout.response_head)]
    )
    return -(flat * weights(layout.num_logical_tokens)).sum()


def response_loss_of_stock(model: transformers.PreTrainedModel, batch: Batch) -> torch.Tensor:
    weight = weights(int(batch.offsets[-1]))
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, prompt, start in zip(batch.sequences, batch.prompt_lengths, batch.offsets.tolist(), strict=False):
        log_p = stock_logits(model, tokens).log_softmax(-1)
        places = torch.arange(prompt - 1, len(tokens) - 1)
        loss = loss - (log_p[places, torch.tensor(tokens)[places + 1]] * weight[start + places]).sum()
    return loss


def weights(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradients(model: transformers.PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def test_every_token_of_every_sequence_gets_the_logits_it_has_alone(models: Pair) -> None:
    layout, logits = BATCH.layout(), packed_logits(models.packed, BATCH)
    for tokens in BATCH.sequences:
        expected = stock_logits(models.stock, tokens)[:-1]
        torch.testing.assert_close(logits[sequence_rows(layout, tokens)], expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_the_head_runs_only_on_the_rows_it_is_asked_for(models: Pair) -> None:
    head_index = torch.from_numpy(BATCH.layout().head_index)
    kept = packed_logits(models.packed, BATCH, logits_to_keep=head_index)
    torch.testing.assert_close(kept, packed_logits(models.packed, BATCH)[head_index], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_changing_one_response_leaves_the_logits_of_its_siblings_bit_equal(models: Pair) -> None:
    one = batch_of((PROMPT, (1, 2, 3)), (PROMPT, (4, 5, 6)))
    other = batch_of((PROMPT, (1, 2, 3)), (PROMPT, (4, 60, 61)))
    rows = sequence_rows(one.layout(), one.sequences[0])
    assert rows == sequence_rows(other.layout(), one.sequences[0])
    assert torch.equal(packed_logits(models.packed, one)[rows], packed_logits(models.packed, other)[rows])


def test_every_parameter_gets_the_gradient_of_the_sequences_alone(models: Pair) -> None:
    actual = gradients(models.packed, response_loss_of_packed(models.packed, BATCH))
    expected = gradients(models.stock, response_loss_of_stock(models.stock, BATCH))
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        # transformers' norms and rotary embedding compute in float32 whatever the model's dtype
        error = (actual[name] - want).abs().max() / want.abs().max()
        assert error <= 1e-6, f"{name}: off by {error:.2g}"


def test_activation_recompute_gives_the_same_gradients(models: Pair) -> None:
    model = models.packed.train()
    stored = gradients(model, response_loss_of_packed(model, BATCH))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attention = attention_of(BATCH)
    recomputed = gradients(model, response_loss_of_packed(model, BATCH, attention))
    model.gradient_checkpointing_disable()
    assert attention.calls[ATTENTION] == 2 * model.config.num_hidden_layers  # the layers did run twice
    for name, want in stored.items():
        torch.testing.assert_close(recomputed[name], want, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
def test_a_sliding_window_smaller_than_the_prompt_hides_its_start_from_responses(tmp_path: Path) -> None:
    register_attention()
    model = load(save_tiny_model(tmp_path, "mistral", sliding_window=WINDOW), ATTENTION_NAME)
    changed = (77, *PROMPT[1:])
    one, other = (batch_of((prompt, (1, 2, 3)), (prompt, (4,))) for prompt in (PROMPT, changed))
    reach = model.config.num_hidden_layers * (WINDOW - 1)
    far = torch.from_numpy(one.layout().position_ids > reach)
    difference = (packed_logits(model, one) - packed_logits(model, other)).abs().amax(dim=-1)
    assert (difference[far] == 0).all()
    assert (difference[~far] > 0).all()
