"""``python -m verl_pg_plugin doctor``: what it says and its exit codes."""

import resource
import subprocess
import sys

import pytest
import torch
from verl_pg_plugin.cli.doctor.report import Problem, Section, show

from tests.cli.doctor.support import ACTOR, CPU_ONLY
from verl_pg_plugin.__main__ import main

pytestmark = CPU_ONLY


def run_main(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str, str]:
    code = main(["doctor", *overrides])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_healthy_machine_is_all_fine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(capsys, "--full")
    assert code == 0, out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[-1] == "all fine"
    assert any(line.startswith(f"torch {torch.__version__} supported: ") for line in lines)
    assert "plugin verl_pg_plugin loads" in lines
    assert "language_model fsdp2 PrefixGrouperFSDPEngineWithLMHead ours (device cpu, vendor cpu)" in lines
    assert "auto takes sdpa (prefix_grouper.attention_kernel=auto on device cpu)" in lines
    assert "With these overrides" not in lines


def test_every_problem_has_its_fix_and_the_exit_code_is_1(
    capsys: pytest.CaptureFixture[str], packed: list[str]
) -> None:
    code, out, _ = run_main(capsys, *packed, f"{ACTOR}.qat.enable=True", "prefix_grouper.attention_kernel=flash_attn_2")
    assert code == 1
    assert "2 problems" in out
    assert f"{ACTOR}.qat.enable=True" in out
    assert f"   fix: {ACTOR}.qat.enable=False" in out.splitlines()
    assert "   fix: ++prefix_grouper.attention_kernel=auto" in out.splitlines()


def test_a_wrong_override_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_main(capsys, f"{ACTOR}.no_such_key=1")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: Could not override '{ACTOR}.no_such_key'. To append to your config")


def test_warnings_alone_leave_the_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    warning = Section("Title", (("key", "value"),), (Problem("slow", "faster", is_warning=True),))
    assert show([warning]) == 0
    assert show([warning, Section("Other", (), (Problem("x" * 300, "y" * 300),))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "1. " + "x" * 300 in lines, "a line that is wrapped cannot be copied"
    assert "   fix: " + "y" * 300 in lines


def test_all_ways_to_write_an_option_are_read(capsys: pytest.CaptureFixture[str], packed: list[str]) -> None:
    """verl's own config has no section of ours, so its entry point is given options with a plus; ``++`` fits both."""
    for option in (f"{plus}prefix_grouper.logits_chunk_size=abc" for plus in ("", "+", "++")):
        code, out, _ = run_main(capsys, *packed, option)
        assert code == 1
        assert "1. prefix_grouper.logits_chunk_size=abc: is not an integer" in out


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["patch-model", "--help"], ["doctor"]])
def test_what_needs_no_training_is_there_at_once_and_without_noise(arguments: list[str]) -> None:
    """Two seconds of CPU: an import of verl or torch takes more."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "verl_pg_plugin", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_a_bare_doctor_sees_a_plugin_that_verl_may_not_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    code, out, _ = run_main(capsys)
    assert code == 1
    assert "   fix: unset VERL_USE_EXTERNAL_PLUGINS, or name verl_pg_plugin in it" in out.splitlines()
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other, verl_pg_plugin")
    assert run_main(capsys)[0] == 0
