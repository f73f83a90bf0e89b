"""The doctor's report of this machine's engines and plugins."""

from pathlib import Path

import pytest

from tests.cli.doctor.support import CPU_ONLY, broken_plugin
from verl_pg_plugin.cli.doctor import engines

pytestmark = CPU_ONLY


def test_what_verl_swallows_when_a_plugin_does_not_load_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_plugin(tmp_path, "import no_such_package\n")
    # Python runs this module when it starts: ours now fails in the fresh process, as with a half-removed package.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['verl_pg_plugin.engine.fsdp_engine'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    process = engines.fresh_process()
    assert not process.loads
    no_device, *problems = engines.plugins(process).problems
    assert "finds no cuda device" in no_device.what
    ours, other = sorted(problems, key=lambda problem: problem.is_warning)
    assert "import of verl_pg_plugin.engine.fsdp_engine halted" in ours.what
    assert "No module named 'no_such_package'" in other.what
    assert (ours.is_warning, other.is_warning) == (False, True)
    built = {row[2] for row in engines.engines(process).rows}
    assert built == {"FSDPEngineWithLMHead", "FSDPEngineWithValueHead"}
    assert engines.engines(process).problems == (), "the broken plugin is the problem"


def test_environment_variables_that_put_another_engine_in_force_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "npu")
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    (problem,) = engines.engines(engines.fresh_process()).problems
    assert "language_model/fsdp2" in problem.what
    assert "device npu" in problem.what
    assert problem.fix == "unset VERL_ENGINE_DEVICE"


def test_a_plugin_that_verl_was_told_not_to_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other_plugin")
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    process = engines.fresh_process()
    excluded = engines.plugins(process).problems[-1]
    assert excluded.what == "VERL_USE_EXTERNAL_PLUGINS=other_plugin keeps verl from loading verl_pg_plugin"
    assert "unset VERL_USE_EXTERNAL_PLUGINS" in excluded.fix
    assert engines.engines(process).problems == ()


def test_verl_that_cannot_be_imported_is_a_problem_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "no_such_platform")
    process = engines.fresh_process()
    (problem,) = engines.plugins(process).problems
    assert problem.what.startswith("import verl fails: ValueError: Unknown platform 'no_such_platform'")


def test_a_plugin_without_entry_point_is_named() -> None:
    process = engines.FreshProcess(platform="CPUPlatform", device="cpu", vendor="cpu", available=True)
    (problem,) = engines.plugins(process).problems
    assert "pip install <folder of this repository>" in problem.fix


@pytest.mark.parametrize(
    ("script", "error"),
    [("import os; os.kill(os.getpid(), 9)", "ended with -9"), ("import time; time.sleep(60)", "more than 2 s")],
    ids=["killed", "hanging"],
)
def test_an_import_of_verl_that_never_returns_is_a_problem(
    script: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(engines, "SCRIPT", tmp_path / "script.py")
    monkeypatch.setattr(engines, "TIMEOUT_S", 2)
    (problem,) = engines.plugins(engines.fresh_process()).problems
    assert error in problem.what
