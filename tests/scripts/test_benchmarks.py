"""Benchmarks: cases are what their names say, figures are of measured steps, and trainings end."""

import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench_attention import main as bench_attention
from benchmarks.actor_cases import Work, parse_case
from benchmarks.common import with_ratios
from benchmarks.step_metrics import PHASES, StepRow, rows_of_run
from benchmarks.step_runs import ScriptRun, run_to_end

from verl_pg_plugin.cli.demo import read_steps
from verl_pg_plugin.mixers import PairCost
from verl_pg_plugin.planning.cost import ModelFlops

FLOPS = ModelFlops(per_token=1000.0, per_label=100.0, pairs=(PairCost(1.0),))


@pytest.mark.parametrize("script", ["bench_step", "bench_longest_prompt", "draw_figures", "learning_curves"])
def test_scripts_without_tests_can_be_imported(script: str) -> None:
    importlib.import_module(script)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A chain of 2,000 prompt, 200 reply and 800 tool tokens a turn.
        ("agent:2000,200,800,10,1,1", (10, 67_000, 11_200 - 1)),
        ("agent:9,1,1,2,1-3,2", (8, 8 * 11, 2 * 8 + 4 * 3)),
        # Siblings fork one token early, so each computes that token; the last token of a leaf needs none.
        ("tree:100,5,4,4,1", (4**4, 4**4 * (100 + 4 * 5), 99 + 4 * 5 + 4**2 * 5 + 4**3 * 5 + 4**4 * 5)),
        ("40,8,3,2", (6, 6 * 48, 2 * (39 + 3 * 8))),
    ],
)
def test_cases_share_what_their_names_say(text: str, expected: tuple[int, int, int]) -> None:
    rows = parse_case(text).rows(vocab_size=1 << 30, world_size=1)
    work = Work.of([rows.samples], FLOPS)
    assert (len(rows.group), work.total_tokens, work.computed_tokens) == expected
    assert str(parse_case(text)) == text


def test_attention_benchmark_compares_both_paths_with_float32(tmp_path, monkeypatch) -> None:
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu", "--dtype", "float32"]
    cases, table = ["--cases", "48,16,4,2", "tree:9,3,2,3"], tmp_path / "attention.csv"
    paths = ["--paths", "packed:sdpa", "alone:sdpa", "--repeats", "1", "--csv", str(table)]
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", *shape, *cases, *paths])
    assert bench_attention() == 0
    with table.open() as file:
        rows = {(row["case"], row["path"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4
    assert all(float(row["error"]) < 1e-5 for row in rows.values())
    shared = 47 * 48 // 2 + 4 * (16 * 47 + 16 * 17 // 2)
    assert float(rows["48,16,4,2", "packed:sdpa"]["bound"]) == pytest.approx(4 * (63 * 64 // 2) / shared)


ABOUT = (
    *("model", "outcome", "num_gpus", "max_token_len", "rollout", "cuda_graphs", "gpu_memory_utilization"),
    *("overrides", "device", "driver", "versions", "commit"),
)


def step(seconds: float, peak: float = 10.0) -> dict[str, float]:
    timing = {f"timing_s/{phase}": seconds for phase in PHASES}
    figures = {"perf/throughput": 1000 / seconds, "actor/perf/max_memory_allocated_gb": peak, "perf/mfu/actor": 0.4}
    means = {"prompt_length/mean": 64.0, "response_length/mean": 8.0, "critic/score/mean": 0.5}
    return {**timing, **figures, **means}


def rows(mode: str, *seconds: float, case: str = "64,8,4,4", peak: float = 10.0) -> list[StepRow]:
    about: dict[str, Any] = {"case": case, "mode": mode, **dict.fromkeys(ABOUT)}
    return rows_of_run([step(value, peak) for value in seconds], about)


def test_figures_leave_out_the_first_step_and_compare_modes_of_a_case() -> None:
    measured = rows("packed", 100.0, 2.0, 6.0, 3.0)
    assert [row.phase for row in measured] == list(PHASES)
    assert {(row.seconds_median, row.seconds_min, row.seconds_max) for row in measured} == {(3.0, 2.0, 6.0)}
    assert {row.steps_measured for row in measured} == {3}
    assert measured[0].tokens_per_s_per_gpu == pytest.approx(1000 / 3)
    other_case = rows("packed", 9.0, 9.0, case="128,8,4,4")
    result = with_ratios([*rows("packed", 9.0, 2.0, peak=5.0), *rows("rmpad", 9.0, 5.0), *other_case], "mode")
    speedups = {(row.case, row.mode): row.speedup for row in result if row.phase == "update_actor"}
    assert speedups == {("64,8,4,4", "packed"): 2.5, ("64,8,4,4", "rmpad"): 1.0, ("128,8,4,4", "packed"): None}
    assert {row.memory_ratio for row in result if row.mode == "packed" and row.case == "64,8,4,4"} == {0.5}


def test_metrics_of_a_killed_run_are_read_up_to_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": index, "data": step(float(index))}) for index in (1, 2)]
    path.write_text("\n".join([json.dumps({"step": 0, "data": {"val-core/x": 1.0}}), *lines, lines[0][:20]]))
    assert [data["timing_s/step"] for data in read_steps(path)] == [1.0, 2.0]
    assert read_steps(tmp_path / "none.jsonl") == []


def command_run(folder: Path, *command: str) -> ScriptRun:
    return ScriptRun(list(command), {}, folder / "metrics.jsonl", folder / "run.log")


def test_runs_that_time_out_end_with_all_their_processes(tmp_path: Path) -> None:
    """The grandchild leaves the process group, as Ray's daemons do."""
    script = "setsid sleep 300 & echo $! > child; echo started; wait"
    run = command_run(tmp_path, "bash", "-c", f"cd {tmp_path}; {script}")
    assert run_to_end(run, timeout_s=2) == "timed out after 2 s"
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
    assert run.log.read_text() == "started\n"
    assert run_to_end(command_run(tmp_path, "bash", "-c", "exit 3"), timeout_s=30) == "exit code 3"
    assert run_to_end(command_run(tmp_path, "true"), timeout_s=30) == "ok"
