"""An exception in a later micro-batch leaves nothing of the earlier ones to the next step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_gpu import BF16, SIZES
from tests.support import (
    actor_loss,
    assert_same,
    clone,
    full_gradients,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [*group(9, [4, 6, 3], 1), *group(7, [5, 2], 2), *group(12, [3, 3], 3)]


def test_gradients_of_micro_batches_before_an_error_are_in_no_later_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 keeps them where ``optimizer_zero_grad`` does not reach, until the last micro-batch reduces them."""
    path = save_tiny_model(tmp_path)
    engine = make_engine(path, packed=True)
    batch = make_batch(SAMPLES, max_token_len_per_gpu=24)
    prepare, calls = engine.prepare_model_outputs, []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("in the third micro-batch")
        return prepare(*args, **kwargs)

    with monkeypatch.context() as patched, engine.train_mode():
        patched.setattr(engine, "prepare_model_outputs", fail)
        engine.optimizer_zero_grad()
        with pytest.raises(ZeroDivisionError):
            engine.forward_backward_batch(clone(batch), actor_loss())
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(path, batch, actor_loss()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_activations_offloaded_before_an_error_are_forgotten_and_later_ones_offloaded(
    tmp_path: Path, strategy: str
) -> None:
    """verl's handler counts groups up in a forward and down in its backward, which an error between the two skips."""
    path = save_tiny_model(tmp_path, **SIZES)
    engine = make_engine(path, packed=True, strategy=strategy, engine=BF16, model={"enable_activation_offload": True})
    batch = make_batch([*group(300, [60, 33], 1), *group(150, [100, 40], 2)], max_token_len_per_gpu=420)

    def step(loss: Any) -> tuple[torch.Tensor, int]:
        with engine.train_mode():
            engine.optimizer_zero_grad()
            torch.cuda.reset_peak_memory_stats()
            engine.forward_backward_batch(clone(batch), loss)
        gradient = torch.cat([gradient.flatten() for gradient in full_gradients(engine.module).values()])
        return gradient, torch.cuda.max_memory_allocated()

    step(actor_loss())
    (expected, peak), held = step(actor_loss()), torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            step(lambda **kwargs: 1 / 0)
    gradient, peak_after = step(actor_loss())
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    assert peak_after <= 1.01 * peak
    assert torch.cuda.memory_allocated() <= 1.01 * held
