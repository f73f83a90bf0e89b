"""The entry point: a wrong override ends in one message and exit code 2, before Ray starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf

from verl_pg_plugin import main_ppo
from verl_pg_plugin.config import Mode

ACTOR = "actor_rollout_ref.actor"


def run_main(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verl_pg_plugin.main_ppo", f"hydra.run.dir={tmp_path}", *overrides]
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)


def assert_user_error(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "ray init kwargs" not in result.stdout, "Ray must not start"


def test_violations_are_listed_on_stderr(tmp_path, runnable_overrides):
    result = run_main(
        tmp_path,
        *runnable_overrides,
        f"{ACTOR}.use_prefix_grouper=True",
        f"{ACTOR}.qat.enable=True",
        "actor_rollout_ref.model.mtp.enable=True",
    )
    assert_user_error(result)
    assert "2 problems in the configuration, nothing was started:" in result.stderr
    assert f"fix: {ACTOR}.qat.enable=False" in result.stderr
    assert "fix: actor_rollout_ref.model.mtp.enable=False" in result.stderr


def test_verls_own_objections_end_the_same_way(tmp_path, runnable_overrides):
    result = run_main(tmp_path, *runnable_overrides, f"{ACTOR}.loss_agg_mode=no-such-mode")
    assert_user_error(result)
    assert "no-such-mode" in result.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}, "ppo_micro_batch_size_per_gpu"),
        ({"data.train_batch_size": 2, "trainer.n_gpus_per_node": 3}, "must be divisible"),
        ({f"{ACTOR}.fsdp_config.no_such_field": 1}, "no_such_field"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": "${no.such.key}"}, "no.such.key"),
    ],
    ids=["value", "assertion", "dataclass", "interpolation"],
)
def test_every_kind_of_user_error_is_caught(make_config, settings, message):
    with pytest.raises(main_ppo.USER_ERRORS, match=message):
        main_ppo.prepare(make_config(Mode.PACKED, settings))


@pytest.mark.slow
def test_failed_training_exits_non_zero(tmp_path, runnable_overrides):
    result = run_main(
        tmp_path,
        *runnable_overrides,
        f"{ACTOR}.use_prefix_grouper=True",
        f"data.train_files={tmp_path}/missing.parquet",
        f"data.val_files={tmp_path}/missing.parquet",
        "ray_kwargs.ray_init.num_cpus=2",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    )
    assert result.returncode == 1
    assert "missing.parquet" in result.stderr


@pytest.mark.parametrize("mode", [Mode.PADDED, Mode.RMPAD])
def test_stock_modes_run_verls_own_task_runner(make_config, mode):
    config = make_config(mode)
    assert main_ppo.prepare(config) is main_ppo.TaskRunnerV1
    assert config.trainer.v1.trainer_mode == "sync"


def test_stock_modes_may_run_the_legacy_trainer(make_config):
    from verl.trainer.main_ppo_v0 import TaskRunner

    assert main_ppo.prepare(make_config(Mode.RMPAD, {"trainer.use_v1": False})) is TaskRunner


@pytest.mark.parametrize("trainer_mode", ["sync", "colocate_async", "separate_async"])
def test_packed_mode_selects_the_group_keeping_trainer(make_config, trainer_mode):
    separate = {
        "data.train_batch_size": 8,
        f"{ACTOR}.ppo_mini_batch_size": 2,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
        "ray_kwargs.ray_init.num_gpus": 2,
    }
    settings = separate if trainer_mode == "separate_async" else {}
    config = make_config(Mode.PACKED, {"trainer.v1.trainer_mode": trainer_mode, **settings})
    runner = main_ppo.prepare(config)
    assert config.trainer.v1.trainer_mode == f"pg_{trainer_mode}"
    assert config.trainer.v1[f"pg_{trainer_mode}"] == config.trainer.v1[trainer_mode]
    assert issubclass(runner.__ray_actor_class__, main_ppo.TaskRunnerV1.__ray_actor_class__)


def test_packed_mode_selects_a_trainer_that_somebody_else_registered(make_config, monkeypatch):
    from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base

    monkeypatch.setattr(trainer_base, "TRAINER_REGISTRY", {"theirs": type("Theirs", (PPOTrainerSync,), {})})
    config = make_config(Mode.PACKED, {"trainer.v1.trainer_mode": "theirs"})
    main_ppo.prepare(config)
    assert config.trainer.v1.trainer_mode == "pg_theirs"


def test_packed_mode_runs_under_the_v0_trainer(make_config):
    from verl.trainer.main_ppo_v0 import TaskRunner

    runner = main_ppo.prepare(make_config(Mode.PACKED, {"trainer.use_v1": False}))
    assert issubclass(runner.__ray_actor_class__, TaskRunner.__ray_actor_class__)


def test_unknown_trainer_mode_is_a_user_error(make_config):
    with pytest.raises(main_ppo.USER_ERRORS, match="no_such_mode"):
        main_ppo.prepare(make_config(Mode.PACKED, {"trainer.v1.trainer_mode": "no_such_mode"}))


def test_the_task_runners_process_knows_the_group_keeping_trainers():
    """A config without ``transfer_queue`` stops the run right after the trainer class was looked up."""
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False)
    try:
        config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "pg_sync"}}})
        with pytest.raises(AttributeError, match="Missing key transfer_queue"):
            ray.get(main_ppo.task_runner(use_v1=True).remote().run.remote(config))
    finally:
        ray.shutdown()
