"""An engine that runs inside another one's loss, as distillation and reference models do, cuts its own mini-batch."""

from pathlib import Path
from typing import Any

import pytest
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.support import actor_loss, clone, full_gradients, group, make_engine, response_values, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

OUTER = [*group(9, [4, 6, 3], 1), *group(7, [5, 2], 2)]
INNER = [*group(12, [3, 3], 3), *group(5, [6], 4)]


@pytest.mark.parametrize("inner_packed", [False, True], ids=["stock inside packed", "packed inside packed"])
def test_an_engine_inside_the_loss_of_another_gets_its_own_micro_batches(tmp_path: Path, inner_packed: bool) -> None:
    path = save_tiny_model(tmp_path)
    outer = make_engine(path, packed=True)
    inner = make_engine(path, packed=inner_packed, engine_cls=None if inner_packed else FSDPEngineWithLMHead)
    inner_batch = make_batch(INNER, max_token_len_per_gpu=24)
    outer_batch = make_batch(OUTER, max_token_len_per_gpu=24)

    def infer() -> list[Any]:
        with inner.eval_mode():
            return response_values(inner.infer_batch(clone(inner_batch))["model_output"]["log_probs"], inner_batch)

    expected, found, loss = infer(), [], actor_loss()

    def asking(**kwargs: Any) -> Any:
        found.append(infer())
        return loss(**kwargs)

    def update(with_loss: Any) -> dict:
        with outer.train_mode():
            outer.optimizer_zero_grad()
            outer.forward_backward_batch(clone(outer_batch), with_loss)
            return full_gradients(outer.module)

    undisturbed, disturbed = update(loss), update(asking)
    assert len(found) > 1, "several micro-batches"
    for values in found:
        assert all(a.equal(b) for a, b in zip(values, expected, strict=True))
    assert all(gradient.equal(disturbed[name]) for name, gradient in undisturbed.items())
