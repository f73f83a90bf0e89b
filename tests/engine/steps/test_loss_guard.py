"""A loss that fails is told once all micro-batches have run, with its first error, and every layer gets a gradient."""

from typing import Any

import pytest
import torch

from verl_pg_plugin.engine.steps.loss_guard import LossGuard


def test_the_first_error_is_kept_and_no_later_loss_is_asked() -> None:
    guard, asked = LossGuard(), []

    def loss(model_output: dict, step: int) -> Any:
        asked.append(step)
        if step:
            raise ZeroDivisionError(f"in step {step}")
        return torch.ones(()), {"loss": 1.0}

    guarded = guard.around(loss)
    assert guarded is not None
    output = {"log_probs": torch.zeros(3)}
    assert guarded(model_output=output, step=0) == (torch.ones(()), {"loss": 1.0})
    guard.raise_kept()
    for step in (1, 2):
        value, metrics = guarded(model_output=output, step=step)
        assert (value.item(), metrics) == (0.0, {})
    assert asked == [0, 1]
    with pytest.raises(ZeroDivisionError, match="in step 1"):
        guard.raise_kept()


def test_the_zero_in_place_of_a_failed_loss_runs_backward_through_every_output() -> None:
    """Layers of a sharded model reduce gradients in their backward: others would wait for a rank that skips it."""
    guard = LossGuard()
    guarded = guard.around(lambda model_output: 1 / 0)
    assert guarded is not None
    flat, rows = torch.ones(3, requires_grad=True), torch.ones(4, requires_grad=True)
    jagged = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 1, 4]))
    value, _ = guarded(model_output={"values": flat, "log_probs": jagged, "labels": torch.ones(2, dtype=torch.int64)})
    value.backward()
    for leaf in (flat, rows):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_no_loss_stays_no_loss() -> None:
    assert LossGuard().around(None) is None
