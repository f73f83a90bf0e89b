"""``demo`` makes data and a checkpoint for verl, reports each step, and shows the log of a failure."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from verl_pg_plugin.__main__ import main
from verl_pg_plugin.cli import CommandError, demo
from verl_pg_plugin.config.preflight import preflight
from verl_pg_plugin.demo import PROBLEMS, character_tokenizer, chat


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace trainings by a process that writes metrics; packed mode takes a quarter of stock verl's time."""
    commands: list[list[str]] = []

    def popen(command: list[str], env: dict[str, str], **options: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        seconds = 1.0 if "actor_rollout_ref.actor.use_prefix_grouper=True" in command else 4.0
        timings = {f"timing_s/{phase}": seconds for phase in demo.PHASES}
        timings |= {f"{demo.TOKENS}{kind}_tokens": tokens for kind, tokens in (("total", 9e3), ("computed", 3e3))}
        rewards = (0.5, 0.5 + seconds / 8)  # the second step samples other responses
        lines = [json.dumps({"step": step, "data": {demo.REWARD: r, **timings}}) for step, r in enumerate(rewards)]
        code = f"open({env['VERL_FILE_LOGGER_PATH']!r}, 'w').write({chr(10).join([*lines, ''])!r})"
        return real([sys.executable, "-c", code], env=env, **options)  # type: ignore[call-overload, no-any-return]

    real = subprocess.Popen
    monkeypatch.setattr(demo.subprocess, "Popen", popen)
    monkeypatch.setattr(demo, "WARM_UP_STEPS", 1)
    return commands


def test_demo_trains_in_both_modes_and_prints_medians(tmp_path, runs, capsys) -> None:
    assert main(["demo", "--folder", str(tmp_path / "new"), "--steps", "2"]) == 0
    table, progress = capsys.readouterr()
    assert "stock: step 1/2, 4.0 s, reward 0.500" in progress
    assert "4.00x" in table.splitlines()[-4]
    assert "9,000" in table.splitlines()[-3]
    assert table.splitlines()[-1].startswith("rewards are equal before step 2: the modes round differently")
    for command in runs:
        overrides = command[command.index("demo") + 1 :]
        with initialize_config_module("verl_pg_plugin.config.hydra", version_base=None):
            config = compose("demo", [override for override in overrides if not override.startswith("hydra.")])
        for path in (config.data.train_files, config.data.val_files, config.actor_rollout_ref.model.path):
            assert Path(path).exists()
        assert preflight(config) == []


def test_steps_that_cannot_be_are_refused_before_anything_is_written(tmp_path, runs, capsys) -> None:
    for steps in ("0", "1.5"):
        with pytest.raises(SystemExit):
            main(["demo", "--folder", str(tmp_path / "new"), f"--steps={steps}"])
        assert f"argument --steps: {steps} is not an integer from 1 to " in capsys.readouterr().err
    assert not runs
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_packed_demo_updates_in_half_the_time(tmp_path, capsys) -> None:
    assert main(["demo", "--folder", str(tmp_path / "new"), "--steps", "2"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("update_actor"))
    assert float(row.split()[-1].rstrip("x")) > 2


def test_prompts_have_the_configured_length_and_differ_early() -> None:
    write = partial(character_tokenizer().apply_chat_template, add_generation_prompt=True, return_dict=False)
    prompts = [write(chat(question, demo.SYSTEM_CHARACTERS)) for question, _ in PROBLEMS[:3]]
    assert {len(prompt) for prompt in prompts} == {512}
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 3


def test_failures_end_with_their_log_and_existing_folders_are_kept(tmp_path, monkeypatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no room left; exit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CommandError, match=r"(?s)stock: exit code 3 after 0 steps.*no room left"):
        demo.train(tmp_path, "stock", 1)
    before = sorted(tmp_path.rglob("*"))
    assert main(["demo", "--folder", str(tmp_path)]) == 2
    assert sorted(tmp_path.rglob("*")) == before
