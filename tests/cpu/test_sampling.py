"""One sampling step: filters keep what vLLM's keep, log-probs are of the filtered distribution."""

from __future__ import annotations

import pytest
import torch

from verl_pg_plugin.cpu.sampling import BatchSampler, SamplingParams

PROBS_V = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])


def draw(params: SamplingParams, draws: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = BatchSampler.build([params] * draws, torch.Generator().manual_seed(0), "processed_logprobs")
    return sampler.sample(PROBS_V.log().expand(draws, -1))


def expected(kept: list[int], temperature: float = 1.0) -> torch.Tensor:
    weight_V = PROBS_V ** (1 / temperature)
    keep_V = torch.zeros_like(weight_V).index_fill_(0, torch.tensor(kept), 1.0)
    return weight_V * keep_V / (weight_V * keep_V).sum()


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
def test_tokens_follow_the_filtered_distribution_and_log_probs_name_it(
    params: dict, kept: list[int], temperature: float
) -> None:
    expected_V = expected(kept, temperature)
    token_B, log_prob_B = draw(SamplingParams(max_tokens=1, **params))
    frequency_V = torch.bincount(token_B, minlength=5) / len(token_B)
    assert frequency_V.numpy() == pytest.approx(expected_V.numpy(), abs=0.03)
    if params.get("temperature") != 0:  # a greedy token reports the unfiltered distribution, as vLLM does
        assert log_prob_B.exp().numpy() == pytest.approx(expected_V[token_B].numpy(), abs=1e-6)


def test_what_an_agent_loop_sends_is_understood() -> None:
    sent = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert SamplingParams.from_dict(sent, default_max_tokens=7) == SamplingParams(max_tokens=7)


def test_sglangs_name_of_the_token_limit_is_understood() -> None:
    assert SamplingParams.from_dict({"max_new_tokens": 5}, default_max_tokens=7).max_tokens == 5


@pytest.mark.parametrize("sent", [{"repetition_penalty": 1.1}, {"min_p": 0.1}, {"stop": ["x"]}])
def test_a_parameter_that_would_be_ignored_is_refused_by_name(sent: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(sent))):
        SamplingParams.from_dict(sent, default_max_tokens=7)


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}])
def test_a_value_outside_its_range_is_refused_by_name(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**{"max_tokens": 1, **bad})
