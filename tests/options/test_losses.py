"""Every policy loss of verl's registry under every aggregation, over unequal micro-batches: same loss and gradient."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.config.actor import RolloutCorrectionConfig

from tests.options.harness import Checkpoint, Engines
from tests.options.table import BUDGET, DEFAULT, SAMPLES
from tests.support import Result, actor_loss, assert_same, clone, run_engine, run_reference
from verl_pg_plugin.synthetic import make_batch

LOSS_MODES = sorted(core_algos.POLICY_LOSS_REGISTRY)
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
REQUIRED_SETTINGS = {"dro": {"dro_beta": 0.1}}
"""What a loss refuses to run without."""


def seeded(loss: Callable) -> Callable:
    """Some losses draw random numbers: the same in every call."""

    def call(model_output: dict, data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(0)
        return loss(model_output=model_output, data=data)

    return call


def assert_loss_is_that_of_the_rows_alone(engines: Engines, checkpoint: Checkpoint, loss: Callable) -> None:
    batch = make_batch(SAMPLES, max_token_len_per_gpu=45)
    plan = engines.of(DEFAULT).plan(clone(batch), forward_only=False)
    cut = [planned.sequences for planned in plan.micro_batches]
    assert len({len(rows) for rows in cut}) > 1, "the micro-batches are unequal"
    result = run_engine(engines.of(DEFAULT), batch, seeded(loss))
    assert any(gradient.any() for gradient in result.gradients.values())
    assert_same(result, run_reference(checkpoint.model, batch, seeded(loss), cut=cut))


QUICK = {*zip(LOSS_MODES, AGGREGATIONS * 9, strict=False), *(("vanilla", aggregation) for aggregation in AGGREGATIONS)}
"""Every loss, and every aggregation; the slow tests have all of their pairs."""
ALL = [
    pytest.param(*both, marks=[] if both in QUICK else [pytest.mark.slow]) for both in product(LOSS_MODES, AGGREGATIONS)
]


@pytest.mark.parametrize(("mode", "aggregation"), ALL)
def test_policy_loss(engines: Engines, checkpoint: Checkpoint, mode: str, aggregation: str) -> None:
    policy_loss = PolicyLossConfig(loss_mode=mode, **REQUIRED_SETTINGS.get(mode, {}))
    loss = actor_loss(loss_agg_mode=aggregation, policy_loss=policy_loss)
    assert_loss_is_that_of_the_rows_alone(engines, checkpoint, loss)


@pytest.mark.parametrize("kind", ["reinforce", "ppo_clip"])
def test_rollout_correction_computed_in_the_loss(engines: Engines, checkpoint: Checkpoint, kind: str) -> None:
    correction = RolloutCorrectionConfig(loss_type=kind, rollout_is="token", bypass_mode=True)
    loss = actor_loss(policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction))
    assert_loss_is_that_of_the_rows_alone(engines, checkpoint, loss)


@pytest.mark.parametrize("kind", ["kl", "low_var_kl"])
def test_kl_loss(engines: Engines, checkpoint: Checkpoint, kind: str) -> None:
    assert_loss_is_that_of_the_rows_alone(engines, checkpoint, actor_loss(kl_loss_type=kind))


def test_a_loss_of_the_user_that_is_no_policy_loss_at_all(engines: Engines, checkpoint: Checkpoint) -> None:
    def everything(scale: float, model_output: dict, data: TensorDict) -> tuple[torch.Tensor, dict[str, Any]]:
        lengths = data["responses"].offsets().diff().tolist()
        rows = zip(model_output["log_probs"].unbind(), model_output["entropy"].unbind(), lengths, strict=True)
        parts = [p[-n - 1 : -1].square().sum() + e[-n - 1 : -1].exp().sum() for p, e, n in rows]
        return scale * torch.stack(parts).sum(), {}

    assert_loss_is_that_of_the_rows_alone(engines, checkpoint, partial(everything, 1e-3))


def test_rows_of_one_prompt_in_different_batches(engines: Engines, checkpoint: Checkpoint) -> None:
    """Every batch is exact, and the gradients of their sums add up to that of all rows."""
    everything = make_batch(SAMPLES, max_token_len_per_gpu=BUDGET)
    loss = actor_loss(loss_agg_mode="token-sum")
    expected = run_reference(checkpoint.model, everything, loss)
    total = {name: gradient * 0 for name, gradient in expected.gradients.items()}
    for rows in ([0, 2, 4, 7], [1, 5], [3, 6]):
        result = run_engine(engines.of(DEFAULT), tu.index_select_tensor_dict(everything, rows), loss)
        outputs = {name: [values[row] for row in rows] for name, values in expected.outputs.items()}
        assert_same(Result(result.outputs, {}), Result(outputs, {}))
        total = {name: gradient + result.gradients[name] for name, gradient in total.items()}
    assert_same(Result({}, total), Result({}, expected.gradients))
