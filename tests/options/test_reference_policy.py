"""Old, reference and new log-probs all take the packed path: they are exact, and equal where the weights are."""

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tests.options.harness import Checkpoint, Engines, batch_of
from tests.options.table import DEFAULT, case_of
from tests.support import (
    Result,
    actor_loss,
    assert_same,
    infer,
    make_engine,
    response_values,
    run_engine,
    run_reference,
    save_tiny_model,
    update,
)

LORA = case_of("LoRA")


def make_reference_policy(path: str) -> Any:
    """verl's forward-only engine, in float32, with options of its own."""
    options = {"forward_only": True, "model_dtype": "fp32", "param_offload": True, "logits_chunk_size": 3}
    return make_engine(path, engine=options)


def log_probs_of(engine: Any, batch: TensorDict) -> list[torch.Tensor]:
    return response_values(infer(engine, batch)["model_output"]["log_probs"], batch)


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert_same(*(Result({"log_probs": rows}, {}) for rows in (actual, expected)))


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_reference_with_the_actors_weights_has_its_log_probs_bit_for_bit(
    engines: Engines, checkpoint: Checkpoint
) -> None:
    batch = batch_of(DEFAULT)
    engine = make_engine(checkpoint.model, engine={"forward_only": True, "model_dtype": "fp32"})
    reference = log_probs_of(engine, batch)
    for ref, old in zip(reference, log_probs_of(engines.of(DEFAULT), batch), strict=True):
        assert torch.equal(ref, old)


def test_importance_ratio_is_one_at_step_zero_whatever_the_cut(engines: Engines) -> None:
    """Old log-probs come from the inference budget, new ones from the training budget."""
    old = log_probs_of(engines.of(DEFAULT), batch_of(DEFAULT))
    batch = batch_of(case_of("dynamic batch size"))
    batch["old_log_probs"] = jagged(old)
    metrics = update(engines.of(DEFAULT), batch, actor_loss(use_kl_loss=False)).metrics
    assert max(abs(kl) for kl in metrics["actor/ppo_kl"].values) < 1e-6
    assert not any(metrics["actor/pg_clipfrac"].values)


def test_kl_loss_against_another_model(engines: Engines, checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=7)
    batch, expected = batch_of(DEFAULT), batch_of(DEFAULT)
    batch["ref_log_prob"] = jagged(log_probs_of(make_reference_policy(other), batch))
    alone = run_reference(other, expected).outputs["log_probs"]
    assert_close(list(batch["ref_log_prob"].unbind()), alone)
    expected["ref_log_prob"] = jagged(alone)
    loss = actor_loss(kl_loss_coef=1.0)
    assert_same(
        run_engine(engines.of(DEFAULT), batch, loss), run_reference(checkpoint.model, expected, loss), tolerance=3e-5
    )


def test_lora_reference_is_the_model_with_its_adapter_disabled(engines: Engines, checkpoint: Checkpoint) -> None:
    batch, engine = batch_of(LORA), engines.of(LORA)
    with engine.disable_adapter():
        without = log_probs_of(engine, batch)
    assert_close(without, run_reference(checkpoint.model, batch).outputs["log_probs"])
    adapted = run_reference(checkpoint.model, batch, actor_loss(), adapter=checkpoint.adapter).outputs["log_probs"]
    assert_close(log_probs_of(engine, batch), adapted)
    assert not torch.allclose(torch.cat(without), torch.cat(adapted))
