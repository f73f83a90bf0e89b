"""The entry point: a wrong override ends in one message and exit code 2, before Ray starts."""

from __future__ import annotations

import sys

import pytest
from verl.trainer import main_ppo as verls_main_ppo
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.main_ppo_v0 import TaskRunner

from tests.fresh import run_fresh
from verl_pg_plugin import main_ppo
from verl_pg_plugin.config import Mode

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("entry_point", "overrides", "said"),
    [
        (
            main_ppo,
            ("prefix_grouper.verfy=first", "actor_rollout_ref.rollout.name=null"),
            [
                "2 problems in the configuration, nothing was started:",
                "did you mean ++prefix_grouper.verify=first?",
                "2. actor_rollout_ref.rollout.name is not set\n   why: names no rollout engine",
            ],
        ),
        (main_ppo, (f"{ACTOR}.loss_agg_mode=no-such-mode",), ["no-such-mode"]),
        (verls_main_ppo, (f"{ACTOR}.fsdp_config._target_=no.such.Class",), ["1 problem", "cannot be imported"]),
        (
            verls_main_ppo,
            (f"{ACTOR}.fsdp_config.qat.enable=True", "trainer.use_v1=False"),
            [f"fix: {ACTOR}.fsdp_config.qat.enable=False"],
        ),
    ],
    ids=["ours", "ours, as verl objects", "verl's, unknown class", "verl's V0"],
)
def test_errors_are_listed_on_stderr_and_end_the_process_with_code_2(
    entry_point, overrides, said, runnable_overrides, tmp_path, monkeypatch, capsys
):
    """In this process: ``run_ppo``, which starts Ray, must not be reached."""
    monkeypatch.setattr(entry_point, "run_ppo", None)
    flags = (f"{ACTOR}.use_prefix_grouper=True", f"hydra.run.dir={tmp_path}")
    monkeypatch.setattr(sys, "argv", ["main_ppo", *runnable_overrides, *flags, *overrides])
    with pytest.raises(SystemExit) as raised:
        entry_point.main()
    assert raised.value.code == 2
    printed = capsys.readouterr().err
    assert all(text in printed for text in said)
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("key", "value"),
    [(f"{ACTOR}.ulysses_sequence_parallel_size", "${no.such.key}"), ("trainer.v1.trainer_mode", "no.such.key")],
    ids=["interpolation", "trainer"],
)
def test_what_leads_nowhere_is_a_user_error(make_config, key, value):
    with pytest.raises(main_ppo.USER_ERRORS, match=r"no\.such\.key"):
        main_ppo.prepare(make_config(Mode.PACKED, {key: value}))


@pytest.mark.parametrize("mode", [Mode.PADDED, Mode.RMPAD])
def test_stock_modes_run_verls_own_task_runners(make_config, mode):
    config = make_config(mode)
    assert main_ppo.prepare(config) is TaskRunnerV1
    assert config.trainer.v1.trainer_mode == "sync"
    assert main_ppo.prepare(make_config(mode, {"trainer.use_v1": False})) is TaskRunner


@pytest.mark.parametrize("trainer_mode", ["sync", "colocate_async"])
def test_packed_mode_selects_the_group_keeping_trainer(make_config, trainer_mode):
    config = make_config(Mode.PACKED, {"trainer.v1.trainer_mode": trainer_mode})
    runner = main_ppo.prepare(config)
    assert config.trainer.v1.trainer_mode == f"pg_{trainer_mode}"
    assert config.trainer.v1[f"pg_{trainer_mode}"] == config.trainer.v1[trainer_mode]
    assert issubclass(runner.__ray_actor_class__, TaskRunnerV1.__ray_actor_class__)


def test_packed_mode_runs_under_the_v0_trainer(make_config):
    runner = main_ppo.prepare(make_config(Mode.PACKED, {"trainer.use_v1": False}))
    assert issubclass(runner.__ray_actor_class__, TaskRunner.__ray_actor_class__)


def test_a_verl_without_a_line_of_trainers_is_met_with_the_other_one(monkeypatch):
    monkeypatch.delattr("verl.trainer.main_ppo.TaskRunnerV1")
    with pytest.raises(ValueError, match=r"trainer.use_v1=True: .* set trainer.use_v1=False"):
        main_ppo.verls_task_runner(use_v1=True)


ONE_LINE_OF_TRAINERS = """
import importlib, pkgutil, sys

sys.modules.update(dict.fromkeys({absent!r}))  # importing one fails
import verl.trainer.main_ppo
vars(verl.trainer.main_ppo).pop({runner!r}, None)
import verl_pg_plugin
from verl_pg_plugin import compat

for module in pkgutil.walk_packages(verl_pg_plugin.__path__, "verl_pg_plugin."):
    if not module.name.endswith(("__main__", "attention.segment_sum", "cpu.replay_buffer")):  # of Triton, and of V1
        importlib.import_module(module.name)
print([path for path in compat.problems() if "trainer" in path])
"""


@pytest.mark.parametrize(
    ("absent", "runner"),
    [
        (("transfer_queue", "verl.trainer.ppo.v1"), "TaskRunnerV1"),
        (("verl.trainer.main_ppo_v0",), ""),
    ],
    ids=["V0 alone", "V1 alone"],
)
def test_without_a_line_of_trainers_every_module_imports_and_no_name_is_missed(absent, runner):
    (ended,) = run_fresh([(ONE_LINE_OF_TRAINERS.format(absent=absent, runner=runner), {"VERL_PLATFORM": "cpu"})])
    assert (ended.returncode, ended.stdout.split()) == (0, ["[]"]), ended.stderr
