"""An update that takes old log-probs from its own forward equals one with old log-probs of a separate forward."""

import math
from typing import Any

import pytest
import torch
from benchmarks.batches import make_batch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.test_exactness import MIXED, PADDED
from tests.support import FUSED_HEAD, actor_loss, clone, infer, jagged, make_engine, old_outputs, splitting, update
from verl_pg_plugin.config.keys import FROM_UPDATE
from verl_pg_plugin.issue import BatchError

MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed": ({}, {"max_token_len_per_gpu": 60}),
    "split groups": ({"splits": True}, {"max_token_len_per_gpu": 38}),
    "logits in chunks": ({"engine": {"logits_chunk_size": 3}}, {}),
    "fused head": ({"model": FUSED_HEAD}, {"use_fused_kernels": True}),
    "padded groups": ({"padded": True}, PADDED),
}
"""Arguments of ``make_engine`` and fields of the batch."""


def without_old_log_probs(batch: TensorDict) -> TensorDict:
    """The batch as the trainer passes it to the update."""
    batch = clone(batch)
    batch["old_log_probs"] = jagged(torch.full_like(row, math.nan) for row in batch["old_log_probs"].unbind())
    tu.assign_non_tensor(batch, **{FROM_UPDATE: True})
    return batch


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_those_with_a_separate_forward(qwen3: str, mode: str, entropy_coeff: float) -> None:
    options, settings = MODES[mode]
    engine = make_engine(qwen3, **options)
    batch = make_batch(MIXED, **settings, calculate_entropy=entropy_coeff > 0)
    loss = actor_loss(entropy_coeff=entropy_coeff)
    asked = clone(batch)
    tu.assign_non_tensor(asked, calculate_entropy=True)  # as verl's trainers do for old log-probs
    separate = old_outputs(engine, asked)
    batch["old_log_probs"] = jagged(separate["log_probs"])
    expected, marked = update(engine, batch, loss), without_old_log_probs(batch)
    with splitting(engine) if mode == "split groups" else torch.enable_grad():
        got = update(engine, marked, loss)

    assert got.gradients.keys() == expected.gradients.keys()
    for name, want in expected.gradients.items():
        assert (got.gradients[name] - want).abs().max() <= 1e-6 * want.abs().max(), name
    assert got.loss == pytest.approx(expected.loss, abs=1e-6)
    assert got.metrics.keys() == expected.metrics.keys(), "entropy that the loss does not read is no metric"
    assert set(got.metrics["actor/ppo_kl"].values) == {0.0}, "the ratio is exactly 1"
    kept = old_outputs(engine, marked)
    assert kept.keys() == separate.keys() == {"log_probs", "entropy"}
    for name, rows in separate.items():
        torch.testing.assert_close(kept[name], rows, rtol=1e-6, atol=1e-5)


def test_the_outputs_are_kept_without_another_forward(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = without_old_log_probs(make_batch(MIXED))
    update(packed, marked)
    monkeypatch.setattr(packed, "plan", None)
    assert infer(packed, marked)["model_output"]["log_probs"].shape[0] == len(MIXED)


def test_what_an_update_cannot_provide_names_the_override(packed: Any) -> None:
    marked = without_old_log_probs(make_batch(MIXED))
    fix = r"^\+\+prefix_grouper\.old_log_prob=auto: {}.* Fix: \+\+prefix_grouper\.old_log_prob=always$"
    with pytest.raises(BatchError, match=fix.format("the last update had other sequences")):
        infer(packed, marked)
    update(packed, marked)
    with pytest.raises(BatchError, match=fix.format("a batch has several optimizer steps")):
        update(packed, marked)
    with pytest.raises(BatchError, match=fix.format("the last update had other sequences")):
        infer(packed, without_old_log_probs(make_batch(MIXED[::-1])))
    marked["advantages"] = marked["old_log_probs"]
    with pytest.raises(BatchError, match=fix.format("all advantages are NaN")):
        update(packed, marked)


def test_one_nan_reward_gives_nan_gradients_as_in_stock_verl(packed: Any) -> None:
    """verl skips such a step."""
    marked = without_old_log_probs(make_batch(MIXED))
    marked["advantages"] = jagged([marked["old_log_probs"][0], *marked["advantages"].unbind()[1:]])
    assert all(gradient.isnan().any() for gradient in update(packed, marked).gradients.values())
