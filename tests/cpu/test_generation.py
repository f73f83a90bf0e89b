"""Sampling: filters match vLLM's, and log-probs match a forward pass of each sequence alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from make_tiny_checkpoint import ARCHITECTURES, tiny_model
from transformers import PreTrainedModel

from verl_pg_plugin.cpu.generation import Completion, Request, SamplingParams, derived_seed, generate, sample

EOS = 3
PROMPTS = [(10, 11, 12, 13, 14), (20, 21), (10, 11, 12, 13, 14), (7,)]


def requests(**params: Any) -> list[Request]:
    params = {"max_tokens": 12, **params}
    return [Request(prompt, SamplingParams(seed=index, **params)) for index, prompt in enumerate(PROMPTS)]


def run(model: PreTrainedModel, batch: list[Request], eos: int = EOS, **options: Any) -> list[Completion]:
    return generate(model, batch, eos_token_ids={eos}, **options)


@torch.no_grad()
def assert_log_probs(model: PreTrainedModel, prompt: Sequence[int], output: Any, temperature: float = 1.0) -> None:
    """Compare with a forward pass of the sequence alone, unpadded, without a cache."""
    logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1] / temperature
    expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0].tolist()
    assert output.log_probs == pytest.approx(expected, abs=1e-5)


def test_log_probs_and_recurrent_states_match_single_sequences(model: PreTrainedModel, tokenizer: Any) -> None:
    for prompt, output in zip(PROMPTS, run(model, requests(temperature=0.5, ignore_eos=True)), strict=True):
        assert_log_probs(model, prompt, output, temperature=0.5)
    torch.manual_seed(0)
    hybrid = tiny_model(tokenizer, "qwen3_5_text", **ARCHITECTURES["qwen3_5_text"]).eval()
    for prompt, output in zip(PROMPTS, run(hybrid, requests(ignore_eos=True, max_tokens=4)), strict=True):
        assert_log_probs(hybrid, prompt, output)


def test_responses_end_at_eos_max_tokens_or_abort(model: PreTrainedModel) -> None:
    free = run(model, requests(ignore_eos=True))
    eos = free[1].token_ids[4]
    for before, after in zip(free, run(model, requests(), eos=eos), strict=True):
        length = before.token_ids.index(eos) + 1 if eos in before.token_ids else 12
        assert after.token_ids == before.token_ids[:length]
        assert not after.aborted
        assert after.log_probs == pytest.approx(before.log_probs[:length], abs=1e-5)
    short = [requests(ignore_eos=True, max_tokens=n)[n - 1] for n in range(1, len(PROMPTS) + 1)]
    assert run(model, short, aborted=lambda: True) == [Completion()] * len(PROMPTS)
    assert [one.token_ids for one in run(model, short)] == [one.token_ids[:n] for n, one in enumerate(free, 1)]


PROBS_V = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])


@pytest.mark.parametrize(
    ("params", "kept", "temperature"),
    [
        ({}, [0, 1, 2, 3, 4], 1.0),
        ({"temperature": 0.7}, [0, 1, 2, 3, 4], 0.7),
        ({"top_k": 2}, [1, 3], 1.0),
        ({"top_k": 99}, [0, 1, 2, 3, 4], 1.0),
        ({"top_p": 0.75}, [1, 3, 4], 1.0),
        ({"top_p": 0.01}, [1], 1.0),
        ({"top_k": 3, "top_p": 0.5}, [1, 3], 1.0),
        ({"temperature": 0}, [1], 1.0),
    ],
)
def test_samples_follow_the_filtered_distribution(params, kept, temperature) -> None:
    weight_V = torch.zeros(5).index_copy_(0, torch.tensor(kept), PROBS_V[kept] ** (1 / temperature))
    expected_V, draws, sampling = weight_V / weight_V.sum(), 4000, SamplingParams(max_tokens=1, seed=0, **params)
    generators = [torch.Generator().manual_seed(0)] * draws
    token_B, log_prob_B = sample(PROBS_V.log().expand(draws, -1), [sampling] * draws, generators)
    assert (torch.bincount(token_B, minlength=5) / draws).numpy() == pytest.approx(expected_V.numpy(), abs=0.03)
    if params.get("temperature") != 0:  # a greedy token reports the unfiltered distribution, as vLLM does
        assert log_prob_B.exp().numpy() == pytest.approx(expected_V[token_B].numpy(), abs=1e-6)


def test_agent_loop_parameters_are_read_and_derived_seeds_are_stable() -> None:
    sent = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 3}
    assert SamplingParams.from_dict({**sent, "max_tokens": 7}) == SamplingParams(max_tokens=7, seed=3)
    assert derived_seed(42, 1, False, 3, 0) == 3439002361853188162


def test_unsupported_and_out_of_range_parameters_are_refused() -> None:
    unsupported = {"repetition_penalty": 1.1, "min_p": 0.1, "stop": ["x"], "prompt_logprobs": 3}
    for name, value in {**unsupported, "max_tokens": 0, "temperature": -1.0, "top_p": 0.0}.items():
        with pytest.raises(ValueError, match=name):
            SamplingParams.from_dict({"seed": 0, "max_tokens": 7, name: value})
