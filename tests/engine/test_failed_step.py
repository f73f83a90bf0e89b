"""An exception in a later micro-batch leaves nothing of the earlier ones to the next step."""

import gc
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensordict import TensorDict
from verl.utils.activation_offload import SynchronizedGroupOffloadHandler

from tests.support import actor_loss, assert_same, clone, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [*group(9, [4, 6, 3], 1), *group(7, [5, 2], 2), *group(12, [3, 3], 3)]


def fail_an_update(engine: Any, batch: TensorDict, owner: Any, function: str, at: int) -> None:
    """Run an update in which call number ``at`` of a function raises."""
    works, calls = getattr(owner, function), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise ZeroDivisionError(f"in call {at}")
        return works(*args, **kwargs)

    engine.optimizer_zero_grad()
    with patch.object(owner, function, fails), engine.train_mode(), pytest.raises(ZeroDivisionError):
        engine.forward_backward_batch(clone(batch), actor_loss())


def test_gradients_of_micro_batches_before_an_error_are_in_no_later_update(tmp_path: Path) -> None:
    """FSDP2 keeps them where ``optimizer_zero_grad`` does not reach, until the last micro-batch reduces them."""
    path = save_tiny_model(tmp_path)
    engine = make_engine(path, packed=True)
    batch = make_batch(SAMPLES, max_token_len_per_gpu=24)
    fail_an_update(engine, batch, engine, "prepare_model_outputs", at=3)
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(path, batch, actor_loss()))


def test_an_error_inside_a_layer_leaves_no_offloaded_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's handler counts layers up in a forward and down in its backward, which never comes."""
    without_pinning = partial(SynchronizedGroupOffloadHandler.offload, pin_memory=False)  # which takes a GPU
    monkeypatch.setattr(SynchronizedGroupOffloadHandler, "offload", staticmethod(without_pinning))
    path = save_tiny_model(tmp_path, num_hidden_layers=4)
    engine = make_engine(path, packed=True, model={"enable_activation_offload": True})
    batch = make_batch(SAMPLES, max_token_len_per_gpu=24)

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects())

    expected = run_reference(path, batch, actor_loss())
    assert_same(run_engine(engine, clone(batch), actor_loss()), expected)
    engine.optimizer_zero_grad()
    before = num_tensors()
    fail_an_update(engine, batch, PackedAttention, "attend_packed", at=3)
    assert num_tensors() <= before
    assert_same(run_engine(engine, clone(batch), actor_loss()), expected)
