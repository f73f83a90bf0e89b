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
        (main_ppo, (f"{ACTOR}.ulysses_sequence_parallel_size=${{no.such.key}}",), ["no.such.key"]),
        (verls_main_ppo, (f"{ACTOR}.fsdp_config._target_=no.such.Class",), ["1 problem", "cannot be imported"]),
        (
            verls_main_ppo,
            (f"{ACTOR}.fsdp_config.qat.enable=True", "trainer.use_v1=False"),
            [f"fix: {ACTOR}.fsdp_config.qat.enable=False"],
        ),
    ],
    ids=["ours", "ours, interpolation", "verl's, unknown class", "verl's V0"],
)
def test_errors_are_listed_on_stderr_and_end_the_process_with_code_2(
    entry_point, overrides, said, runnable_overrides, tmp_path, monkeypatch, capsys
):
    """In this process: ``run_ppo``, which starts Ray, must not be reached."""
    monkeypatch.setattr(verls_main_ppo, "run_ppo", None)
    flags = (f"{ACTOR}.use_prefix_grouper=True", f"hydra.run.dir={tmp_path}")
    monkeypatch.setattr(sys, "argv", ["main_ppo", *runnable_overrides, *flags, *overrides])
    with pytest.raises(SystemExit) as raised:
        entry_point.main()
    assert raised.value.code == 2
    printed = capsys.readouterr().err
    assert all(text in printed for text in said)
    assert "Traceback" not in printed


@pytest.mark.parametrize("mode", [Mode.RMPAD, Mode.PACKED])
@pytest.mark.parametrize("use_v1", [True, False])
def test_a_run_that_can_start_gets_verls_own_task_runner(mode, use_v1, runnable_overrides, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(verls_main_ppo, "run_ppo", lambda config, task_runner_class: started.append(task_runner_class))
    flags = (f"{ACTOR}.use_prefix_grouper={mode.shares_prefixes}", f"trainer.use_v1={use_v1}")
    monkeypatch.setattr(sys, "argv", ["main_ppo", *runnable_overrides, *flags, f"hydra.run.dir={tmp_path}"])
    main_ppo.main()
    assert started == [TaskRunnerV1 if use_v1 else TaskRunner]


ONE_LINE_OF_TRAINERS = """
import importlib, pkgutil, sys

sys.modules.update(dict.fromkeys({absent!r}))  # importing one fails
import verl.trainer.main_ppo
vars(verl.trainer.main_ppo).pop({runner!r}, None)
import verl_pg_plugin
from verl_pg_plugin import compat

for module in pkgutil.walk_packages(verl_pg_plugin.__path__, "verl_pg_plugin."):
    # of Triton, of V1 and of VeOmni
    if not module.name.endswith(("__main__", "attention.segment_sum", "cpu.replay_buffer", "engine.veomni")):
        importlib.import_module(module.name)
print([path for path in compat.problems() if "trainer" in path])
"""


def test_without_a_line_of_trainers_every_module_imports_and_no_name_is_missed():
    without_v1 = {"absent": ("transfer_queue", "verl.trainer.ppo.v1"), "runner": "TaskRunnerV1"}
    without_v0 = {"absent": ("verl.trainer.main_ppo_v0",), "runner": ""}
    cases = [ONE_LINE_OF_TRAINERS.format(**absent) for absent in (without_v1, without_v0)]
    for ended in run_fresh([(code, {"VERL_PLATFORM": "cpu"}) for code in cases]):
        assert (ended.returncode, ended.stdout.split()) == (0, ["[]"]), ended.stderr
