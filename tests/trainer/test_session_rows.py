"""Sessions with one sequence per turn through verl's V1 trainer match single sequences.

The agent example runs one step with a learning rate of 0, so all mini-batches have the weights of the reference here.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.test_end_to_end import REPOSITORY, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SESSIONS, PROMPTS, PROMPTS_OF_A_MINI_BATCH = 4, 4, 2
SEQUENCES_OF_A_MINI_BATCH = PROMPTS_OF_A_MINI_BATCH * SESSIONS
FILLER_TOKENS = 127
"""Computed tokens of verl's filler sequence: 127 prompt tokens and one response token."""


def num_packed(sequences: Iterable[SimpleNamespace]) -> int:
    """Number of distinct pairs of a context and the token that it predicts."""
    return len({tuple(s.tokens[:stop]) for s in sequences for stop in range(2, len(s.tokens) + 1)})


@dataclass(frozen=True)
class Recorded:
    """The first step: its sequences (the fields of ``recorded_updates`` and ``tokens``), its metrics and the model."""

    sequences: list[SimpleNamespace]
    metrics: dict[str, Any]
    model: Any

    @property
    def mini_batches(self) -> list[list[SimpleNamespace]]:
        size = SEQUENCES_OF_A_MINI_BATCH
        return [self.sequences[i : i + size] for i in range(0, len(self.sequences), size)]

    def log_probs(self, sequence: SimpleNamespace) -> torch.Tensor:
        """Log-probs of the response of a single sequence."""
        logits = self.model(input_ids=torch.tensor([sequence.tokens])).logits[0, len(sequence.prompts) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, sequence.responses[:, None])[:, 0]

    def mean_norm(self, advantages: list[torch.Tensor]) -> float:
        """Mean gradient norm of the mini-batches, computed from single sequences."""
        norms, remaining = [], iter(advantages)
        for sequences in self.mini_batches:
            self.model.zero_grad()
            tokens = sum(int(s.response_mask.sum()) for s in sequences)
            for s in sequences:
                (-(next(remaining) * s.response_mask * self.log_probs(s)).sum() / tokens).backward()
            norms.append(torch.nn.utils.get_total_norm([weight.grad for weight in self.model.parameters()]))
        return float(torch.stack(norms).mean())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("run")
    train(
        folder,
        script="run_qwen3_agent_pg.sh",
        TRAIN_BATCH_SIZE=str(PROMPTS),
        PPO_MINI_BATCH_SIZE=str(PROMPTS_OF_A_MINI_BATCH),
        ROLLOUT_N=str(SESSIONS),
        TOTAL_STEPS="1",
        LR="0.0",
        VERL_USE_EXTERNAL_MODULES="tests.trainer.recorded_updates",
        PYTHONPATH=f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
        RECORD_DIR=str(folder),
    )
    sequences, metrics = torch.load(folder / "step-1.pt", weights_only=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "model-qwen3", dtype=torch.float32)
    tokens = [[*s["prompts"].tolist(), *s["responses"].tolist()] for s in sequences]
    return Recorded([SimpleNamespace(**s, tokens=t) for s, t in zip(sequences, tokens, strict=True)], metrics, model)


def test_old_log_probs_match_single_sequences(recorded: Recorded) -> None:
    with torch.no_grad():
        for s in recorded.sequences:
            if not s.filler:
                torch.testing.assert_close(s.old_log_probs, recorded.log_probs(s), rtol=1e-5, atol=1e-5)


def test_the_gradient_norm_matches_single_sequences_with_their_advantages(recorded: Recorded) -> None:
    """At a ratio of 1, and with the policy as reference, the gradient is that of advantage x log-prob."""
    expected = recorded.mean_norm([s.advantages for s in recorded.sequences])
    of_rewards = recorded.mean_norm([torch.full_like(s.advantages, s.rm_scores.sum()) for s in recorded.sequences])
    assert expected > 0
    assert of_rewards != pytest.approx(expected, rel=1e-2), "rewards in place of advantages change the gradient"
    assert recorded.metrics["actor/grad_norm"] == pytest.approx(expected, rel=1e-4)


def test_computed_tokens_count_shared_tokens_and_filler_sequences_once(recorded: Recorded) -> None:
    fillers = [s for s in recorded.sequences if s.filler]
    assert len(fillers) == -(len(recorded.sequences) - len(fillers)) % SEQUENCES_OF_A_MINI_BATCH
    assert len(recorded.mini_batches) > PROMPTS // PROMPTS_OF_A_MINI_BATCH, "a session has several sequences"
    assert not any(s.response_mask.any() for s in fillers)
    assert all(num_packed([s]) == num_packed(fillers) == FILLER_TOKENS for s in fillers)
    computed = list(map(num_packed, recorded.mini_batches))
    assert computed == [
        num_packed(s for s in sequences if not s.filler) + FILLER_TOKENS * any(s.filler for s in sequences)
        for sequences in recorded.mini_batches
    ]
    total = recorded.metrics["actor/prefix_grouper/computed_tokens"]
    assert total - recorded.metrics["actor/prefix_grouper/padding_tokens"] == sum(computed) / len(computed)
    assert recorded.metrics["prefix_grouper/lost_to_broken_prefixes"] == 0
