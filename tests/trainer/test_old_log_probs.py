"""verl's trainers take old log-probs from the update, with the metrics of a separate forward.

tests/test_end_to_end.py has the run of V1, tests/trainer/test_v0_runs.py that of V0.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests.test_end_to_end import ONE_UPDATE, train
from tests.trainer.test_v0 import Stock
from verl_pg_plugin.config.keys import FROM_UPDATE
from verl_pg_plugin.trainer.old_log_probs import compute_or_postpone

OPTION = "prefix_grouper.old_log_prob"


class OfVerl(Stock):
    """verl's trainer without what its ``__init__`` builds, at step 1."""

    __module__ = RayPPOTrainer.__module__
    global_steps = 1


@pytest.fixture
def one_step(config: DictConfig) -> DictConfig:
    """Two prompts with two responses each are one mini-batch."""
    engine = {"fsdp_config": {"_target_": "verl_pg_plugin.config.PrefixGrouperEngineConfig"}}
    settings = {"data": {"train_batch_size": 2}, "trainer": {"critic_warmup": 0}}
    settings["actor_rollout_ref"] = {"actor": engine}
    return OmegaConf.merge(config, settings)  # type: ignore[return-value]


def postponed(trainer: Any, batch: DataProto) -> bool:
    forward = object()
    result = compute_or_postpone(lambda *_: forward, trainer, batch)
    if result is forward:
        return False
    outputs, mfu = result
    assert mfu == 0
    assert outputs.batch["old_log_probs"].isnan().all(), "a value that is read before the update shows"
    return True


def batch_of(num_sequences: int, **info: Any) -> DataProto:
    return DataProto.from_dict({"response_mask": torch.ones(num_sequences, 3)}, meta_info=info)


def test_a_batch_of_one_optimizer_step_is_postponed(one_step: DictConfig, caplog) -> None:
    trainer = OfVerl(one_step)
    assert postponed(trainer, batch_of(4))
    assert not postponed(trainer, batch_of(4, **{FROM_UPDATE: True})), "after the update"
    for num_sequences in (8, 12):
        assert not postponed(trainer, batch_of(num_sequences))
    assert postponed(trainer, batch_of(4))
    (message,) = caplog.messages  # each reason once
    assert message == "step 1: separate forward for old log-probs: the batch is not one mini-batch of 4 sequences"


def test_steps_without_an_update_and_other_trainers_run_the_forward(one_step: DictConfig, caplog) -> None:
    one_step.trainer.critic_warmup = 2
    trainer = OfVerl(one_step)
    assert not postponed(trainer, batch_of(4))
    trainer.global_steps = 2
    assert postponed(trainer, batch_of(4))
    custom = Stock(one_step)
    custom.global_steps = 2
    assert not postponed(custom, batch_of(4))
    assert compute_or_postpone(lambda *_: "computed", trainer, list(range(4))) == "computed"
    warm_up, other, kind = (message.partition(" for old log-probs: ")[2] for message in caplog.messages)
    assert kind == "list is neither a KVBatchMeta nor a DataProto"
    assert warm_up == "trainer.critic_warmup=2: no update follows"
    assert other == "tests.trainer.test_v0.Stock is not verl's trainer and may read them"


def test_reasons_of_the_config_run_the_forward(one_step: DictConfig) -> None:
    one_step.actor_rollout_ref.actor.ppo_epochs = 2
    assert not postponed(OfVerl(one_step), batch_of(4))
    stock = SimpleNamespace(
        config=OmegaConf.merge(one_step, {"actor_rollout_ref": {"actor": {"use_prefix_grouper": 0}}})
    )
    assert not postponed(stock, batch_of(4))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("use_v1", [True, False])
def test_every_metric_equals_that_of_a_separate_forward(tmp_path: Path, use_v1: bool) -> None:
    settings = f"trainer.use_v1={use_v1}", "actor_rollout_ref.rollout.seed=1", "data.seed=1"
    sizes = {**ONE_UPDATE, "TOTAL_STEPS": "1"}  # two runs of one mode may differ later: responses arrive in any order
    names = "auto", "always"
    (ours,), (separate,) = (train(tmp_path / name, *settings, f"{OPTION}={name}", **sizes)[1] for name in names)
    assert ours.keys() == separate.keys()
    for name in (name for name in separate if "timing" not in name and "perf/" not in name):
        assert ours[name] == pytest.approx(separate[name], rel=1e-5, abs=1e-6), name
