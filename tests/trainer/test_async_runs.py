"""Asynchronous trainers run packed mode end to end, with responses that several weight versions generated."""

from pathlib import Path

import pytest

from tests.test_end_to_end import OLD_LOG_PROBS, ONE_UPDATE, assert_shared, train
from verl_pg_plugin.config import Mode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLOW_ROLLOUTS = (  # so that some run while weights are sent
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.max_num_seqs=2",
)
SERVERS_APART = (
    "actor_rollout_ref.rollout.checkpoint_engine.backend=store",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tests.trainer.weight_store",
    "++ray_kwargs.ray_init.num_gpus=2",  # one worker trains, one holds the weights of a server
    "ray_kwargs.ray_init.num_cpus=48",
)
RECIPE = (
    *SERVERS_APART,
    "hydra.searchpath=[pkg://verl.trainer.config]",
    "trainer.use_v1=False",
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
)
SPANS = "training/off_policy/trajectory_spans/max"


def updates_of(folder: Path, *overrides: str, least: float = 2, **variables: str) -> list[dict[str, float]]:
    """Train with samples of every micro-batch verified, and return the metrics of steps that update the actor."""
    summary, steps = train(folder, "++prefix_grouper.verify=every_1", *overrides, **variables)
    assert summary["mode"] == Mode.PACKED.value
    updates = [step for step in steps if "actor/grad_norm" in step]
    assert updates
    assert_shared(updates, least, tolerance=None)  # older weights sampled some responses
    assert max(step["actor/prefix_grouper/verify_max_error"] for step in updates) < 1e-4
    return updates


def test_colocate_async_trains_on_partial_rollouts_through_verls_entry_point(tmp_path: Path) -> None:
    updates = updates_of(
        tmp_path,
        *SLOW_ROLLOUTS,
        "trainer.v1.trainer_mode=colocate_async",
        "+prefix_grouper.logits_chunk_size=64",
        ENTRY_POINT="verl.trainer.main_ppo",
        NGPUS_PER_NODE="2",
        TOTAL_STEPS="3",
        **ONE_UPDATE,
    )
    assert OLD_LOG_PROBS in (tmp_path / "console.log").read_text()
    for step in updates:
        assert step["prefix_grouper/balance/cut_groups"] == 0
        assert 1 <= step["prefix_grouper/balance/slowest_over_mean"] < 1.5
    assert max(step[SPANS] for step in updates) > 1


def test_separate_async_corrects_rollouts_of_older_weights(tmp_path: Path) -> None:
    """Each step has two updates, whose old log-probs have the weights before both."""
    updates = updates_of(
        tmp_path,
        *SERVERS_APART,
        *SLOW_ROLLOUTS,
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "algorithm.rollout_correction.rollout_is=token",
        TOTAL_STEPS="3",
    )
    for step in updates:
        assert step["prefix_grouper/balance/cut_groups"] == 0
        assert 0.8 < step["prefix_grouper/balance/estimated_over_computed_tokens"] < 5, "all prompts share a preamble"
    assert updates[0]["training/rollout_probs_diff_max"] < 1e-4
    assert updates[0]["rollout_corr/rollout_is_min"] > 1 - 1e-4
    assert updates[-1]["rollout_corr/rollout_is_min"] < 0.9
    assert max(step[SPANS] for step in updates) > 1


def test_the_one_step_off_recipe_trains(tmp_path: Path) -> None:
    main = "verl.experimental.one_step_off_policy.main_ppo"
    updates = updates_of(tmp_path, *RECIPE, least=8, ENTRY_POINT=main)
    assert [step["prefix_grouper/balance/cut_groups"] for step in updates] == [0, 0]


def test_the_fully_async_recipe_corrects_partial_rollouts_in_bypass_mode(tmp_path: Path) -> None:
    """It drops the metrics of the balance."""
    updates = updates_of(
        tmp_path,
        *RECIPE,
        *SLOW_ROLLOUTS,
        "data.gen_batch_size=1",
        "rollout.n=8",
        "rollout.total_rollout_steps=16",
        "async_training.trigger_parameter_sync_step=2",
        "async_training.staleness_threshold=1",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
        "+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}",
        ENTRY_POINT="verl.experimental.fully_async_policy.fully_async_main",
        TRAIN_BATCH_SIZE="0",
        TOTAL_STEPS="null",
    )
    assert updates[-1]["actor/rollout_corr/rollout_is_min"] < 0.9
    assert max(step["fully_async/partial/total_partial_num"] for step in updates) > 0
