"""Trainers with separate rollout servers run packed mode end to end."""

from pathlib import Path

import pytest

from tests.test_end_to_end import assert_shared, train
from verl_pg_plugin.config import Mode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

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
SEPARATE_ASYNC = (
    *SERVERS_APART,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
)
FULLY_ASYNC = (
    *RECIPE,
    "data.gen_batch_size=1",
    "rollout.n=8",
    "rollout.total_rollout_steps=16",
    "async_training.trigger_parameter_sync_step=2",
)
FULLY_MAIN = "verl.experimental.fully_async_policy.fully_async_main"
RUNS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "separate_async": (SEPARATE_ASYNC, {}),
    "one_step_off": (RECIPE, {"ENTRY_POINT": "verl.experimental.one_step_off_policy.main_ppo"}),
    "fully_async": (FULLY_ASYNC, {"ENTRY_POINT": FULLY_MAIN, "TRAIN_BATCH_SIZE": "0", "TOTAL_STEPS": "null"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_trainers_with_separate_rollout_servers_train_in_packed_mode(name: str, tmp_path: Path) -> None:
    overrides, variables = RUNS[name]
    summary, steps = train(tmp_path, *overrides, **variables)
    assert summary["mode"] == Mode.PACKED.value
    trained = [step for step in steps if "actor/grad_norm" in step]  # fully async sends weights in separate steps
    assert trained == steps or (trained and name == "fully_async")
    assert_shared(trained, least=8, tolerance=None)
    for step in trained:
        if name != "fully_async":
            assert step["prefix_grouper/balance/cut_groups"] == 0
        if name == "separate_async":
            assert 0.8 < step["prefix_grouper/balance/estimated_over_computed_tokens"] < 5, (
                "all prompts share a preamble"
            )
