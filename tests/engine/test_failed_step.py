"""An exception in a later micro-batch leaves nothing of the earlier ones to the next step."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import actor_loss, assert_same, clone, group, make_engine, run_engine, run_reference, save_tiny_model
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
