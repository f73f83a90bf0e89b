"""Every policy loss of verl under every aggregation, and old, reference and new log-probs."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from benchmarks.batches import make_batch
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.workers.config import PolicyLossConfig

from tests.options.harness import Engines, batch_of
from tests.options.table import DEFAULT, SAMPLES, case_of
from tests.support import actor_loss, check_exact, check_outputs, clone, jagged, make_engine, update

LOSS_MODES = sorted(core_algos.POLICY_LOSS_REGISTRY)
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
REQUIRED_SETTINGS = {"dro": {"dro_beta": 0.1}}


def assert_loss_matches_single_sequences(engines: Engines, loss: Callable) -> None:
    def seeded(model_output: dict, data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(0)  # some losses draw random numbers
        return loss(model_output=model_output, data=data)

    engine, batch = engines.of(DEFAULT), make_batch(SAMPLES, max_token_len_per_gpu=45)
    cut = [planned.sequences for planned in engine.plan(clone(batch), forward_only=False).micro_batches]
    assert len({len(rows) for rows in cut}) > 1, "the micro-batches are unequal"
    result = check_exact(engine, engines.checkpoint.model, batch, seeded, cut=cut)
    assert any(gradient.any() for gradient in result.gradients.values())


QUICK = {*zip(LOSS_MODES, AGGREGATIONS * 9, strict=False), *(("vanilla", aggregation) for aggregation in AGGREGATIONS)}
"""Every loss and every aggregation; the slow tests have all pairs."""
ALL = [
    pytest.param(*both, marks=[] if both in QUICK else [pytest.mark.slow]) for both in product(LOSS_MODES, AGGREGATIONS)
]


@pytest.mark.parametrize(("mode", "aggregation"), ALL)
def test_policy_losses_match_single_sequences(engines: Engines, mode: str, aggregation: str) -> None:
    policy_loss = PolicyLossConfig(loss_mode=mode, **REQUIRED_SETTINGS.get(mode, {}))
    assert_loss_matches_single_sequences(engines, actor_loss(loss_agg_mode=aggregation, policy_loss=policy_loss))


@pytest.mark.parametrize("kind", ["kl", "low_var_kl"])
def test_kl_losses_match_single_sequences(engines: Engines, kind: str) -> None:
    assert_loss_matches_single_sequences(engines, actor_loss(kl_loss_type=kind))


def test_a_custom_loss_matches_single_sequences(engines: Engines) -> None:
    def everything(model_output: dict, data: TensorDict) -> tuple[torch.Tensor, dict[str, Any]]:
        lengths = data["responses"].offsets().diff().tolist()
        rows = zip(model_output["log_probs"].unbind(), model_output["entropy"].unbind(), lengths, strict=True)
        parts = [p[-n - 1 : -1].square().sum() + e[-n - 1 : -1].exp().sum() for p, e, n in rows]
        return 1e-3 * torch.stack(parts).sum(), {}

    assert_loss_matches_single_sequences(engines, everything)


def test_the_importance_ratio_is_one_at_step_zero_across_budgets(engines: Engines) -> None:
    """Old log-probs come from the inference budget, new ones from the training budget."""
    old = check_outputs(engines.of(DEFAULT), engines.checkpoint.model, batch_of(DEFAULT))
    batch = batch_of(case_of("dynamic batch size"))
    batch["old_log_probs"] = jagged(old["log_probs"])
    metrics = update(engines.of(DEFAULT), batch, actor_loss(use_kl_loss=False)).metrics
    assert max(abs(kl) for kl in metrics["actor/ppo_kl"].values) < 1e-6
    assert not any(metrics["actor/pg_clipfrac"].values)


def test_a_reference_with_the_actors_weights_has_equal_log_probs(engines: Engines) -> None:
    path, options = engines.checkpoint.model, {"forward_only": True, "model_dtype": "fp32", "param_offload": True}
    reference = make_engine(path, engine=options)
    outputs = [check_outputs(engine, path, batch_of(DEFAULT)) for engine in (reference, engines.of(DEFAULT))]
    assert all(map(torch.equal, *(of_engine["log_probs"] for of_engine in outputs)))


def test_lora_reference_is_the_model_with_its_adapter_disabled(engines: Engines) -> None:
    case, checkpoint = case_of("LoRA"), engines.checkpoint
    batch, engine = batch_of(case), engines.of(case)
    with engine.disable_adapter():
        without = check_outputs(engine, checkpoint.model, batch)
    adapted = check_outputs(engine, checkpoint.model, batch, checkpoint.adapter)
    assert not torch.allclose(*(torch.cat(outputs["log_probs"]) for outputs in (without, adapted)))
