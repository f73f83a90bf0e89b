"""Sessions with one row per turn through verl's V1 trainer: every row trains as if it were alone.

The run is the agent example's for one step, with a learning rate of 0 so that all of its mini-batches see the weights
that the reference here has. What the trainer sent to the update is recorded.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.test_end_to_end import REPOSITORY, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SESSIONS, PROMPTS, PROMPTS_OF_A_MINI_BATCH = 4, 4, 2
ROWS_OF_A_MINI_BATCH = PROMPTS_OF_A_MINI_BATCH * SESSIONS
FILLER_ROWS = 127
"""Of verl's filler sequence: 127 tokens of prompt and one of response."""


def row_of(fields: dict[str, Any]) -> SimpleNamespace:
    """One sequence as it was sent to the update: the fields of ``recorded_updates``, and all of its tokens."""
    return SimpleNamespace(**fields, tokens=[*fields["prompts"].tolist(), *fields["responses"].tolist()])


def num_packed(rows: Iterable[SimpleNamespace]) -> int:
    """A token of the model for each: the tokens that it has seen and the one it predicts."""
    return len({tuple(row.tokens[:stop]) for row in rows for stop in range(2, len(row.tokens) + 1)})


@dataclass(frozen=True)
class Recorded:
    """A run's first step."""

    rows: list[SimpleNamespace]
    metrics: dict[str, Any]
    model: Any

    @cached_property
    def mini_batches(self) -> list[list[SimpleNamespace]]:
        return [self.rows[i : i + ROWS_OF_A_MINI_BATCH] for i in range(0, len(self.rows), ROWS_OF_A_MINI_BATCH)]

    @cached_property
    def real(self) -> list[SimpleNamespace]:
        return [row for row in self.rows if not row.filler]

    def log_probs(self, row: SimpleNamespace) -> torch.Tensor:
        """Of the response, by the row alone."""
        logits = self.model(input_ids=torch.tensor([row.tokens])).logits[0, len(row.prompts) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, row.responses[:, None])[:, 0]

    def mean_norm(self, advantages: list[torch.Tensor]) -> float:
        """Of the gradients of all mini-batches, every row computed alone."""
        norms, of_row = [], iter(advantages)
        for rows in self.mini_batches:
            self.model.zero_grad()
            tokens = sum(int(row.response_mask.sum()) for row in rows)
            for row in rows:
                (-(next(of_row) * row.response_mask * self.log_probs(row)).sum() / tokens).backward()
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
        VERL_USE_EXTERNAL_MODULES="tests.trainer.recorded_updates",  # imported here it would stay in this process
        PYTHONPATH=f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
        RECORD_DIR=str(folder),
    )
    rows, metrics = torch.load(folder / "step-1.pt", weights_only=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "model-qwen3", dtype=torch.float32)
    return Recorded([row_of(fields) for fields in rows], metrics, model)


def test_old_log_probs_are_those_of_every_row_alone(recorded: Recorded) -> None:
    with torch.no_grad():
        for row in recorded.real:
            torch.testing.assert_close(row.old_log_probs, recorded.log_probs(row), rtol=1e-5, atol=1e-5)


def test_the_updates_gradient_is_that_of_every_row_alone_with_its_advantage(recorded: Recorded) -> None:
    """At a ratio of 1, and where the reference policy is the policy, the gradient is that of advantage x log-prob."""
    expected = recorded.mean_norm([row.advantages for row in recorded.rows])
    without_groups = recorded.mean_norm([torch.full_like(row.advantages, row.rm_scores.sum()) for row in recorded.rows])
    assert expected > 0
    assert without_groups != pytest.approx(expected, rel=1e-2), "rewards would train something else"
    assert recorded.metrics["actor/grad_norm"] == pytest.approx(expected, rel=1e-4)


def test_the_engine_computes_each_row_once_and_the_fillers_of_the_last_mini_batch_as_one(recorded: Recorded) -> None:
    fillers = [row for row in recorded.rows if row.filler]
    assert len(fillers) == -len(recorded.real) % ROWS_OF_A_MINI_BATCH
    assert len(recorded.mini_batches) > PROMPTS // PROMPTS_OF_A_MINI_BATCH, "a session is more than a row"
    assert not any(row.response_mask.any() for row in fillers)
    assert all(num_packed([row]) == num_packed(fillers) == FILLER_ROWS for row in fillers)
    computed = list(map(num_packed, recorded.mini_batches))
    real = [num_packed(row for row in rows if not row.filler) for rows in recorded.mini_batches]
    with_fillers = [any(row.filler for row in rows) for rows in recorded.mini_batches]
    assert computed == [n + FILLER_ROWS * filled for n, filled in zip(real, with_fillers, strict=True)]
    physical = recorded.metrics["actor/prefix_grouper/computed_tokens"]
    assert physical - recorded.metrics["actor/prefix_grouper/padding_tokens"] == sum(computed) / len(computed)
