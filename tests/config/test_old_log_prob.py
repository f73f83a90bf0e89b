"""Overrides that need old log-probs before the update, and those with which the update provides them."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from tests.config.config_support import compose_config
from verl_pg_plugin.cli.overrides import run_lines
from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.engage import engage
from verl_pg_plugin.config.old_log_prob import separate_forward_reasons

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
NEEDS_FORWARD = [
    ("prefix_grouper.old_log_prob=always", "++prefix_grouper.old_log_prob=always"),
    ("algorithm.use_kl_in_reward=True", "the KL in the reward reads them"),
    (f"{CORRECTION}.bypass_mode=True", "they are those of the rollout"),
    (f"{CORRECTION}.rollout_is=token", "importance weights read them"),
    (f"{CORRECTION}.rollout_rs=token_k1", "rejection sampling reads them"),
    (f"{ACTOR}.calculate_sum_pi_squared=True", "advantages read them"),
    (f"{ACTOR}.shuffle=True", "the update has another order of sequences"),
    ("algorithm.use_pf_ppo=True", "the update gets other samples of the batch"),
    ("distillation.enabled=True", "a distillation loss may need no log-probs"),
    ("data.train_batch_size=0", "a batch may have several mini-batches"),
    (f"{ACTOR}.ppo_mini_batch_size=2", "a batch of 4 prompts has several mini-batches"),
    (f"{ACTOR}.ppo_epochs=2", "later epochs read them"),
    (f"{ACTOR}.policy_loss.loss_mode=mine", "this loss is not verl's"),
    (f"{ACTOR}.policy_loss.loss_mode=kl_cov", "its penalty has no gradient where the ratio is 1"),
    ("trainer.v1.trainer_mode=separate_async", "its weights may differ from those of the update"),
    ("trainer.v1.trainer_mode=mine", "its weights may differ from those of the update"),
]
PROVIDED = [
    "",
    "trainer.use_v1=False",
    "trainer.use_v1=False trainer.v1.trainer_mode=separate_async",  # V0 does not read it
    "trainer.v1.trainer_mode=colocate_async",
    "algorithm.rollout_correction=null",
    "actor_rollout_ref.rollout.calculate_log_probs=False",
    f"{ACTOR}.entropy_coeff=0.1",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.policy_loss.loss_mode=gspo",
    "algorithm.adv_estimator=gae critic.model.path={checkpoint}",
]


@pytest.mark.parametrize(("override", "why"), NEEDS_FORWARD)
def test_a_reader_is_named_with_its_setting(config_of: Any, override: str, why: str) -> None:
    (reason,) = separate_forward_reasons(config_of(override))
    assert override in reason
    assert reason.endswith(why)


@pytest.mark.parametrize("overrides", PROVIDED)
def test_the_update_provides_old_log_probs_of_one_optimizer_step(config_of: Any, overrides: str) -> None:
    assert separate_forward_reasons(config_of(overrides)) == []
    assert separate_forward_reasons(config_of(overrides, mode=Mode.PADDED_GROUPS)) == []
    (reason,) = separate_forward_reasons(config_of(overrides, mode=Mode.RMPAD))
    assert reason == f"{ACTOR}.use_prefix_grouper=False"


def test_a_registered_loss_of_the_user_may_read_them(config_of: Any) -> None:
    with patch.dict(POLICY_LOSS_REGISTRY, mine=lambda **_: None):
        (reason,) = separate_forward_reasons(config_of(f"{ACTOR}.policy_loss.loss_mode=mine"))
    assert reason == f"{ACTOR}.policy_loss.loss_mode=mine: this loss is not verl's"


def test_stock_engines_do_not_provide_them(config_of: Any) -> None:
    """Their updates would read the placeholder."""
    target = f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig"
    assert separate_forward_reasons(config_of(target)) == [f"{target}: this engine's updates do not provide them"]


def test_router_replay_records_experts_in_the_forward(checkpoint: Path) -> None:
    replay = "model_engine=veomni", f"{ACTOR}.use_prefix_grouper=True", f"{ACTOR}.ppo_mini_batch_size=1024"
    for mode, expected in (
        ("R2", [f"{ACTOR}.veomni.router_replay.mode=R2: their forward records the experts"]),
        ("R3", []),
    ):
        assert (
            separate_forward_reasons(compose_config(*replay, f"{ACTOR}.veomni.router_replay.mode={mode}")) == expected
        )


def test_each_reason_is_one_line_of_the_log_and_of_the_doctor(config_of: Any, caplog) -> None:
    for overrides, expected in (
        (
            f"{ACTOR}.ppo_epochs=2 algorithm.use_kl_in_reward=True",
            [
                "algorithm.use_kl_in_reward=True: the KL in the reward reads them",
                f"{ACTOR}.ppo_epochs=2: later epochs read them",
            ],
        ),
        ("", ["none by the configuration, they are those of the update"]),
    ):
        config = config_of(overrides)
        caplog.clear()
        with caplog.at_level("INFO"):
            engage(config)
        what = "separate forward for old log-probs"
        logged = [message for message in caplog.messages if what in message]
        assert logged == [f"verl_pg_plugin: {what}: {reason}" for reason in expected]
        assert [line.text for line in run_lines(config, asks_verl=False) if line.what == what] == expected
