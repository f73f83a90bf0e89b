"""Trainings that scripts start and compare: their inputs, figures of the right steps, and how they end."""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import learning_curves
import psutil
import pytest
from bench_step import StepCase, mode, run_of
from benchmarks.step_inputs import chat_of_length, word_tokenizer
from benchmarks.step_metrics import PHASES, StepRow, rows_of_run, with_ratios
from benchmarks.step_runs import ScriptRun, run_to_end

from verl_pg_plugin.cli.demo import read_steps

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_step.py"
ABOUT = (
    *("model", "outcome", "num_gpus", "max_token_len", "rollout", "cuda_graphs", "gpu_memory_utilization"),
    *("overrides", "device", "driver", "versions", "commit"),
)


def step(seconds: float, peak: float = 10.0) -> dict[str, float]:
    """Metrics of a step in which every phase took ``seconds``."""
    timing = {f"timing_s/{phase}": seconds for phase in PHASES}
    figures = {"perf/throughput": 1000 / seconds, "actor/perf/max_memory_allocated_gb": peak, "perf/mfu/actor": 0.4}
    means = {"prompt_length/mean": 64.0, "response_length/mean": 8.0, "critic/score/mean": 0.5}
    return {**timing, **figures, **means}


def rows(mode: str, *seconds: float, case: str = "64,8,4,4", peak: float = 10.0) -> list[StepRow]:
    about: dict[str, Any] = {"case": case, "mode": mode, **dict.fromkeys(ABOUT)}
    return rows_of_run([step(value, peak) for value in seconds], about)


def test_the_first_step_never_reaches_the_figures() -> None:
    measured = rows("packed", 100.0, 2.0, 6.0, 3.0)
    assert [row.phase for row in measured] == list(PHASES)
    assert {(row.seconds_median, row.seconds_min, row.seconds_max) for row in measured} == {(3.0, 2.0, 6.0)}
    assert {row.steps_measured for row in measured} == {3}
    assert measured[0].tokens_per_s_per_gpu == pytest.approx(1000 / 3)


def test_speed_up_is_rmpads_time_over_the_modes_time_within_one_case() -> None:
    other_case = rows("packed", 9.0, 9.0, case="128,8,4,4")
    result = with_ratios([*rows("packed", 9.0, 2.0, peak=5.0), *rows("rmpad", 9.0, 5.0), *other_case])
    speedups = {(row.case, row.mode): row.speedup for row in result if row.phase == "update_actor"}
    assert speedups == {("64,8,4,4", "packed"): 2.5, ("64,8,4,4", "rmpad"): 1.0, ("128,8,4,4", "packed"): None}
    assert {row.memory_ratio for row in result if row.mode == "packed" and row.case == "64,8,4,4"} == {0.5}


def test_metrics_of_a_killed_run_are_read_up_to_the_line_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": index, "data": step(float(index))}) for index in (1, 2)]
    validation = json.dumps({"step": 0, "data": {"val-core/x": 1.0}})
    path.write_text("\n".join([validation, *lines, lines[0][:20]]))
    assert [data["timing_s/step"] for data in read_steps(path)] == [1.0, 2.0]
    assert read_steps(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("length", [9, 513])
def test_a_prompt_has_exactly_the_tokens_asked_for(length: int) -> None:
    tokenizer = word_tokenizer(512)
    messages = chat_of_length(tokenizer, length, random.Random(0))
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == length
    assert tokenizer.unk_token_id not in ids


def test_a_mode_with_options_becomes_overrides_of_the_plugins_section(tmp_path: Path) -> None:
    args = Namespace(
        **{"work_dir": tmp_path, "output_dir": tmp_path, "ngpus": 1, "max_token_len": 2048, "ref_max_token_len": 8192},
        **{"gpu_memory_utilization": 0.3, "steps": 2, "cuda_graphs": False, "overrides": ["a.b=1"]},
    )
    text = mode("packed:compile_layers=True,carry=never")
    run = run_of(StepCase(64, 8, 4, 4), text, args, "cpu", tmp_path, tmp_path)
    assert run.command[-3:] == ["prefix_grouper.compile_layers=True", "prefix_grouper.carry=never", "a.b=1"]
    assert run.command[1].endswith("run_qwen3_pg.sh")
    assert (run.environment["MAX_TOKEN_LEN"], run.environment["REF_MAX_TOKEN_LEN"]) == ("2048", "8192")
    for text in ("rmpad:compile_layers=True", "padding_free"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            mode(text)


def test_modes_whose_learning_is_compared_get_one_seed_one_optimizer_step_and_the_same_budget(tmp_path: Path) -> None:
    args = Namespace(output_dir=tmp_path, lr=3e-4, steps=60, overrides=["a.b=1"])
    run = learning_curves.run_of("packed", 7, args, "gpu")
    ours, theirs = run.environment, learning_curves.run_of("rmpad", 7, args, "gpu").environment
    own = {"WORK_DIR", "VERL_FILE_LOGGER_PATH", "USE_PREFIX_GROUPER"}
    assert {key for key in ours if ours[key] != theirs[key]} <= own
    assert ours["TRAIN_BATCH_SIZE"] == ours["PPO_MINI_BATCH_SIZE"]
    assert {"data.seed=7", "actor_rollout_ref.rollout.seed=7", "a.b=1"} <= set(run.command)


def command_run(folder: Path, *command: str) -> ScriptRun:
    return ScriptRun(list(command), {}, folder / "metrics.jsonl", folder / "run.log")


def test_a_run_that_outlives_its_time_is_ended_with_every_process_it_started(tmp_path: Path) -> None:
    """The grandchild leaves the process group, as Ray's daemons do."""
    script = "setsid sleep 300 & echo $! > child; echo started; wait"
    run = command_run(tmp_path, "bash", "-c", f"cd {tmp_path}; {script}")
    assert run_to_end(run, timeout_s=2) == "timed out after 2 s"
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
    assert run.log.read_text() == "started\n"
    assert run_to_end(command_run(tmp_path, "bash", "-c", "exit 3"), timeout_s=30) == "exit code 3"
    assert run_to_end(command_run(tmp_path, "true"), timeout_s=30) == "ok"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_both_modes_are_timed_on_the_cpu_and_a_mode_that_fails_keeps_the_others_figures(tmp_path: Path) -> None:
    """End to end: generated checkpoint and prompts, verl's trainer, Ray; the third mode is refused by the plugin."""
    results = tmp_path / "results"
    command = [sys.executable, str(SCRIPT), "--cases", "64,8,4,2", "--steps", "2"]
    command += ["--modes", "rmpad", "packed", "packed:attention_kernel=none_such", "--max-token-len", "1024"]
    command += ["--work-dir", str(tmp_path / "work"), "--output-dir", str(results)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    failure = "FAILED 64,8,4,2 packed:attention_kernel=none_such: exit code 2, 0 of 2 steps"
    assert failure in " ".join(done.stdout.split())
    with (results / "bench_step.csv").open() as file:
        measured = list(csv.DictReader(file))
    assert {(row["mode"], row["outcome"]) for row in measured} == {("rmpad", "ok"), ("packed", "ok")}
    for row in measured:
        assert (float(row["prompt_tokens"]), float(row["response_tokens"])) == (64.0, 8.0)
        assert float(row["seconds_median"]) > 0
    (dedup,) = {float(row["dedup_ratio"]) for row in measured if row["mode"] == "packed"}
    assert dedup == pytest.approx(4 * (64 + 8) / (64 + 4 * 8), rel=0.05), "one prompt, four responses"
