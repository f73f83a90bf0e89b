"""Sampling: log-probs against a forward pass of each row alone, stopping, aborting, batching."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_pg_plugin.cpu.generation import Completion, Request, generate
from verl_pg_plugin.cpu.sampling import SamplingParams

EOS = 3
PROMPTS = [(10, 11, 12, 13, 14), (20, 21), (10, 11, 12, 13, 14), (7,)]


def requests(**params: object) -> list[Request]:
    params = {"max_tokens": 12, **params}
    return [
        Request(prompt, SamplingParams(seed=index, **params))  # type: ignore[arg-type]
        for index, prompt in enumerate(PROMPTS)
    ]


def run(model: PreTrainedModel, batch: list[Request], eos: int = EOS, **options: object) -> list[Completion]:
    generator = torch.Generator().manual_seed(0)
    return generate(model, batch, eos_token_ids={eos}, generator=generator, **options)  # type: ignore[arg-type]


@torch.no_grad()
def reference_log_probs(
    model: PreTrainedModel, prompt: tuple[int, ...], response: list[int], temperature: float = 1.0
) -> list[float]:
    """The row alone, unpadded, without a cache."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_are_those_of_a_forward_pass_of_each_row_alone(model: PreTrainedModel, temperature: float) -> None:
    batch = requests(temperature=temperature, ignore_eos=True)
    for request, completion in zip(batch, run(model, batch), strict=True):
        expected = reference_log_probs(model, request.prompt_ids, completion.token_ids, temperature)
        assert completion.log_probs == pytest.approx(expected, abs=1e-5)


def test_recurrent_states_stay_with_their_requests(tokenizer: PreTrainedTokenizerBase) -> None:
    from make_tiny_checkpoint import tiny_model

    torch.manual_seed(0)
    model = tiny_model(tokenizer, "qwen3_5_text", head_dim=32).eval()
    batch = requests(ignore_eos=True, max_tokens=4)
    for request, completion in zip(batch, run(model, batch), strict=True):
        expected = reference_log_probs(model, request.prompt_ids, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected, abs=1e-5)


def test_raw_log_probs_ignore_temperature_and_filters(model: PreTrainedModel) -> None:
    batch = requests(temperature=0.5, top_k=3, ignore_eos=True)
    for request, completion in zip(batch, run(model, batch, logprobs_mode="raw_logprobs"), strict=True):
        expected = reference_log_probs(model, request.prompt_ids, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected, abs=1e-5)


def test_a_response_does_not_depend_on_the_batch_it_was_drawn_in(model: PreTrainedModel) -> None:
    batch = requests(ignore_eos=True)
    for together, request in zip(run(model, batch), batch, strict=True):
        (alone,) = run(model, [request])
        assert together.token_ids == alone.token_ids
        assert together.log_probs == pytest.approx(alone.log_probs, abs=1e-5)


def test_equal_prompts_without_seeds_get_different_responses(model: PreTrainedModel) -> None:
    same = Request(PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True))
    assert len({tuple(completion.token_ids) for completion in run(model, [same] * 8)}) == 8


def test_greedy_takes_the_likeliest_token_each_time(model: PreTrainedModel) -> None:
    batch = requests(temperature=0.0, ignore_eos=True)
    for request, completion in zip(batch, run(model, batch), strict=True):
        row = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            likeliest = model(row).logits[0, len(request.prompt_ids) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == completion.token_ids


def test_the_end_token_stops_a_row_and_is_part_of_it(model: PreTrainedModel) -> None:
    """Rows stop at different steps, so the batch shrinks on the way."""
    free = run(model, requests(ignore_eos=True))
    eos = free[1].token_ids[4]
    for before, after in zip(free, run(model, requests(), eos=eos), strict=True):
        length = before.token_ids.index(eos) + 1 if eos in before.token_ids else 12
        assert after.token_ids == before.token_ids[:length]
        assert after.finish_reason == ("stop" if eos in before.token_ids else "length")
        assert after.log_probs == pytest.approx(before.log_probs[:length], abs=1e-5)


def test_every_request_keeps_its_own_max_tokens(model: PreTrainedModel) -> None:
    batch = [
        Request(prompt, SamplingParams(max_tokens=1 + index, ignore_eos=True)) for index, prompt in enumerate(PROMPTS)
    ]
    completions = run(model, batch)
    assert [len(completion.token_ids) for completion in completions] == [1, 2, 3, 4]
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_an_abort_returns_the_tokens_so_far(model: PreTrainedModel) -> None:
    steps = count()
    partial = run(model, requests(ignore_eos=True), aborted=lambda: next(steps) >= 3)
    whole = run(model, requests(ignore_eos=True))
    for before, after in zip(whole, partial, strict=True):
        assert after.finish_reason == "abort"
        assert after.token_ids == before.token_ids[:3]
        assert len(after.log_probs) == 3


def test_an_abort_before_the_first_step_returns_empty_responses(model: PreTrainedModel) -> None:
    assert run(model, requests(), aborted=lambda: True) == [Completion([], [], "abort")] * len(PROMPTS)
