"""Rollout correction: weights, masks and gradients in packed mode match single sequences, through verl's functions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from benchmarks.batches import make_batch
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import PolicyLossConfig
from verl.workers.config.actor import RolloutCorrectionConfig

from tests.options.harness import Engines
from tests.options.table import DEFAULT, SAMPLES
from tests.support import Result, actor_loss, assert_same, clone, jagged, old_outputs, run_reference, splitting, update

BUDGET = 38
"""Token budget that splits a group."""
TRUNCATED, MASKED = 1.05, "0.95_1.05"
CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncated, token": {"rollout_is": "token", "rollout_is_threshold": TRUNCATED},
    "truncated, sequence": {"rollout_is": "sequence", "rollout_is_threshold": TRUNCATED},
    "masked, token": {"rollout_is": "token", "rollout_is_threshold": MASKED},
    "masked, sequence": {"rollout_is": "sequence", "rollout_is_threshold": "0.8_1.2"},
    "rejected, token": {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": MASKED},
    "rejected, sequence": {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.01"},
    "truncated and rejected": {
        "rollout_is": "token",
        "rollout_is_threshold": TRUNCATED,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.97_1.03",
    },
}
"""Fields of ``algorithm.rollout_correction``."""


@dataclass(frozen=True)
class Rollout:
    """A batch and each response's log-probs: of single sequences, and of a rollout that differs by noise."""

    batch: TensorDict
    alone: list[torch.Tensor]
    sampled: list[torch.Tensor]

    def corrected(self, log_probs: list[torch.Tensor], config: RolloutCorrectionConfig) -> dict[str, Any]:
        """Fields of the batch as verl's trainers change them before an update in decoupled mode."""
        rows = {"old_log_probs": log_probs, "rollout_log_probs": self.sampled}
        tensors = {name: jagged(row) for name, row in rows.items()} | {"response_mask": self.batch["response_mask"]}
        padded = DataProto.from_dict({name: x.to_padded_tensor(0) for name, x in tensors.items()})
        after, _ = compute_rollout_correction_and_add_to_batch(padded, config)
        fields = {"old_log_probs", "response_mask", "rollout_is_weights"} & set(after.batch.keys())
        pairs = {name: zip(after.batch[name], self.alone, strict=True) for name in fields}
        return {name: [row[: len(own)] for row, own in of_name] for name, of_name in pairs.items()}

    def with_fields(self, fields: dict[str, list[torch.Tensor]]) -> TensorDict:
        batch = clone(self.batch)
        for name, rows in fields.items():
            batch[name] = jagged(rows)
        return batch


@pytest.fixture(scope="module")
def rollout(engines: Engines) -> Rollout:
    batch = make_batch(SAMPLES, max_token_len_per_gpu=BUDGET)
    alone = run_reference(engines.checkpoint.model, batch).outputs["log_probs"]
    generator = torch.Generator().manual_seed(0)
    return Rollout(batch, alone, [x + torch.randn(x.shape, generator=generator) / 10 for x in alone])


def assert_update_matches(engines: Engines, batch: TensorDict, expected: TensorDict, loss: Callable) -> Result:
    """The reference has one loss over all sequences, the engine one in each micro-batch, which cut groups."""
    engine = engines.of(DEFAULT)
    with splitting(engine):
        got = update(engine, batch, loss)
    assert_same(replace(got, outputs={}), replace(run_reference(engines.checkpoint.model, expected, loss), outputs={}))
    return got


def assert_corrects_some_tokens(rollout: Rollout, config: RolloutCorrectionConfig) -> None:
    fields = rollout.corrected(rollout.alone, config)
    kept = torch.cat(fields["response_mask"]) == 1
    if config.rollout_is:
        weights = torch.cat(fields["rollout_is_weights"])
        kept &= (weights > 0) & (weights < float(str(config.rollout_is_threshold).split("_")[-1]))
    assert 0.1 < kept.float().mean() < 0.9


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_decoupled_weights_masks_and_gradients_match_single_sequences(
    engines: Engines, rollout: Rollout, correction: str
) -> None:
    config = RolloutCorrectionConfig(**CORRECTIONS[correction])
    assert_corrects_some_tokens(rollout, config)
    own, alone = old_outputs(engines.of(DEFAULT), rollout.batch)["log_probs"], rollout.alone
    got, expected = (rollout.corrected(log_probs, config) for log_probs in (own, alone))
    assert got.keys() == expected.keys()
    for name, rows in expected.items():
        torch.testing.assert_close(got[name], rows, rtol=1e-5, atol=1e-5, msg=name)
    assert_update_matches(engines, rollout.with_fields(got), rollout.with_fields(expected), actor_loss())


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_bypass_gradients_match_single_sequences(
    engines: Engines, rollout: Rollout, correction: str, loss_type: str
) -> None:
    """The loss reads the log-probs of the rollout as old ones, and computes weights and masks itself."""
    config = RolloutCorrectionConfig(**CORRECTIONS[correction], bypass_mode=True, loss_type=loss_type)
    assert_corrects_some_tokens(rollout, config)
    batch = rollout.with_fields({"old_log_probs": rollout.sampled})
    loss = actor_loss(policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=config))
    result = assert_update_matches(engines, batch, batch, loss)
    assert ("rollout_corr/rollout_is_mean" in result.metrics) == (config.rollout_is is not None)
