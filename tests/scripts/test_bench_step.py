"""scripts/bench_step.py: inputs of the promised length, figures of the right steps, one failure loses nothing else."""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from bench_step import StepCase, mode, run_of  # noqa: E402
from benchmarks.step_inputs import FIXED_WORDS, chat_of_length, make_prompts, word_tokenizer  # noqa: E402
from benchmarks.step_metrics import (  # noqa: E402
    PHASES,
    StepRow,
    read_training_steps,
    rows_of_run,
    table_of,
    with_ratios,
)
from benchmarks.step_reward import compute_score  # noqa: E402
from benchmarks.step_runs import ScriptRun, run_to_end  # noqa: E402

ABOUT: dict[str, Any] = {
    "model": "tiny",
    "case": "64,8,4,4",
    "mode": "packed",
    "outcome": "ok",
    "num_gpus": 1,
    "max_token_len": 20480,
    "rollout": "hf",
    "cuda_graphs": False,
    "gpu_memory_utilization": 0.3,
    "overrides": "",
    "device": "cpu",
    "driver": "-",
    "versions": "torch=2",
    "commit": "abc",
}


def step(seconds: float, **more: float) -> dict[str, float]:
    """Metrics of a step in which every phase took ``seconds``."""
    timing = {f"timing_s/{phase}": seconds for phase in PHASES}
    figures = {"perf/throughput": 1000 / seconds, "actor/perf/max_memory_allocated_gb": 10.0, "perf/mfu/actor": 0.4}
    return {**timing, **figures, "prompt_length/mean": 64.0, "response_length/mean": 8.0, **more}


def rows(mode: str, *seconds: float, **more: float) -> list[StepRow]:
    return rows_of_run([step(value, **more) for value in seconds], {**ABOUT, "mode": mode})


def test_the_first_step_never_reaches_the_figures() -> None:
    measured = rows("packed", 100.0, 2.0, 6.0, 3.0)
    assert [row.phase for row in measured] == list(PHASES)
    assert {(row.seconds_median, row.seconds_min, row.seconds_max) for row in measured} == {(3.0, 2.0, 6.0)}
    assert {row.steps_measured for row in measured} == {3}
    assert measured[0].tokens_per_s_per_gpu == pytest.approx(1000 / 3)


def test_a_run_without_a_second_step_has_no_figures() -> None:
    assert rows("packed", 100.0) == rows("packed") == []


def test_speed_up_is_rmpads_time_over_the_modes_time_within_one_case() -> None:
    other_case = rows_of_run([step(9.0)] * 2, {**ABOUT, "mode": "packed", "case": "128,8,4,4"})
    packed = rows("packed", 9.0, 2.0, **{"actor/perf/max_memory_allocated_gb": 5.0})
    result = with_ratios([*packed, *rows("rmpad", 9.0, 5.0), *other_case])
    speedups = {(row.case, row.mode): row.speedup for row in result if row.phase == "update_actor"}
    assert speedups == {("64,8,4,4", "packed"): 2.5, ("64,8,4,4", "rmpad"): 1.0, ("128,8,4,4", "packed"): None}
    assert {row.memory_ratio for row in result if row.mode == "packed" and row.case == "64,8,4,4"} == {0.5}


def test_a_machine_without_memory_figures_has_no_memory_ratio() -> None:
    on_cpu = {"actor/perf/max_memory_allocated_gb": 0.0}
    result = with_ratios(rows("rmpad", 2.0, 2.0, **on_cpu) + rows("packed", 1.0, 1.0, **on_cpu))
    assert {row.memory_ratio for row in result} == {None}


def test_a_mode_that_does_not_log_sharing_leaves_those_columns_empty() -> None:
    sharing = {
        "actor/prefix_grouper/dedup_ratio": 3.0,
        "actor/prefix_grouper/attention_backend/flash_attn_2": 1.0,
    }
    stock, packed = rows("rmpad", 1.0, 1.0)[0], rows("packed", 1.0, 1.0, **sharing)[0]
    assert (stock.dedup_ratio, stock.attention_kernel) == (None, None)
    assert (packed.dedup_ratio, packed.attention_kernel) == (3.0, "flash_attn_2")


def test_a_phase_that_no_step_timed_has_no_row() -> None:
    without_ref = [{key: value for key, value in step(1.0).items() if key != "timing_s/ref"} for _ in range(2)]
    assert "ref" not in {row.phase for row in rows_of_run(without_ref, ABOUT)}


def test_metrics_of_a_killed_run_are_read_up_to_the_line_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": index, "data": step(float(index))}) for index in (1, 2)]
    validation = json.dumps({"step": 0, "data": {"val-core/x": 1.0}})
    path.write_text("\n".join([validation, *lines, lines[0][:20]]))
    assert [data["timing_s/step"] for data in read_training_steps(path)] == [1.0, 2.0]
    assert read_training_steps(tmp_path / "none.jsonl") == []


def test_the_table_names_the_outcome_of_a_run_that_ended_early() -> None:
    early = rows_of_run([step(1.0)] * 2, {**ABOUT, "outcome": "timed out after 9 s"})
    table = table_of(with_ratios([*rows("rmpad", 2.0, 2.0), *early]))
    assert table.row_count == 2 * len(PHASES)
    assert "packed (timed out after 9 s)" in list(table.columns[1].cells)
    assert list(table.columns[5].cells)[-1] == "2.00"


@pytest.mark.parametrize("length", [9, 64, 513])
def test_a_prompt_has_exactly_the_tokens_asked_for(length: int) -> None:
    tokenizer = word_tokenizer(512)
    messages = chat_of_length(tokenizer, length, random.Random(0))
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == length
    assert tokenizer.unk_token_id not in ids


def test_a_prompt_shorter_than_the_chat_template_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        chat_of_length(word_tokenizer(512), 8, random.Random(0))


def test_every_token_id_is_a_word_and_a_newline_is_one_token() -> None:
    tokenizer = word_tokenizer(512)
    assert len(tokenizer) == 512
    assert tokenizer("\n", add_special_tokens=False).input_ids == [FIXED_WORDS.index("\n")]
    words = [f"w{index}" for index in (8, 300, 511)]
    assert tokenizer(" ".join(words), add_special_tokens=False).input_ids == [8, 300, 511]


def test_prompts_of_a_run_are_all_different_and_numbered(tmp_path: Path) -> None:
    path = make_prompts(tmp_path / "prompts.parquet", word_tokenizer(512), length=32, num_prompts=6)
    data = datasets.Dataset.from_parquet(str(path))
    assert len({row["prompt"][0]["content"] for row in data}) == 6
    assert [row["extra_info"]["index"] for row in data] == list(range(6))


def test_rewards_of_a_group_differ_so_that_the_update_has_a_gradient() -> None:
    scores = [compute_score("random_words", f"w8 w{index}", "") for index in range(16)]
    assert len(set(scores)) == 16
    assert all(0 <= score < 1 for score in scores)


@pytest.mark.parametrize("text", ["4096,1024,4", "4096,1024,4,8,1", "a,1,1,1", "0,1,1,1"])
def test_a_case_that_is_no_case_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        StepCase.parse(text)


def test_a_mode_with_options_becomes_overrides_of_the_plugins_section(tmp_path: Path) -> None:
    args = argparse.Namespace(
        work_dir=tmp_path,
        output_dir=tmp_path,
        ngpus=1,
        max_token_len=2048,
        ref_max_token_len=8192,
        gpu_memory_utilization=0.3,
        steps=2,
        cuda_graphs=False,
        overrides=["a.b=1"],
    )
    text = mode("packed:compile_layers=True,carry=never")
    run = run_of(StepCase(64, 8, 4, 4), text, args, "cpu", tmp_path, tmp_path)
    assert run.command[-3:] == ["prefix_grouper.compile_layers=True", "prefix_grouper.carry=never", "a.b=1"]
    assert run.command[1].endswith("run_qwen3_pg.sh")
    assert (run.environment["MAX_TOKEN_LEN"], run.environment["REF_MAX_TOKEN_LEN"]) == ("2048", "8192")
    for text in ("rmpad:compile_layers=True", "padding_free"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            mode(text)


def command_run(folder: Path, *command: str) -> ScriptRun:
    metrics = folder / "metrics.jsonl"
    return ScriptRun(list(command), {"VERL_FILE_LOGGER_PATH": str(metrics)}, metrics, folder / "run.log")


def test_a_run_that_outlives_its_time_is_ended_with_every_process_it_started(tmp_path: Path) -> None:
    """The grandchild leaves the process group, as Ray's daemons do."""
    script = "setsid sleep 300 & echo $! > child; echo started; wait"
    run = command_run(tmp_path, "bash", "-c", f"cd {tmp_path}; {script}")
    assert run_to_end(run, timeout_s=3) == "timed out after 3 s"
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
    assert run.log.read_text() == "started\n"


def test_a_run_that_fails_tells_its_exit_code_and_one_that_succeeds_is_ok(tmp_path: Path) -> None:
    assert run_to_end(command_run(tmp_path, "bash", "-c", "exit 3"), timeout_s=30) == "exit code 3"
    assert run_to_end(command_run(tmp_path, "true"), timeout_s=30) == "ok"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_both_modes_are_timed_on_the_cpu_and_a_mode_that_fails_keeps_the_others_figures(tmp_path: Path) -> None:
    """End to end: generated checkpoint and prompts, verl's trainer, Ray; the third mode is refused by the plugin."""
    results = tmp_path / "results"
    command = [sys.executable, str(SCRIPTS / "bench_step.py"), "--cases", "64,8,4,2", "--steps", "2"]
    command += ["--modes", "rmpad", "packed", "packed:attention_kernel=none_such", "--max-token-len", "1024"]
    command += ["--work-dir", str(tmp_path / "work"), "--output-dir", str(results)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert "FAILED 64,8,4,2 packed:attention_kernel=none_such: exit code 2, 0 of 2 steps" in " ".join(
        done.stdout.split()
    )
    with (results / "bench_step.csv").open() as file:
        measured = list(csv.DictReader(file))
    assert {(row["mode"], row["outcome"]) for row in measured} == {("rmpad", "ok"), ("packed", "ok")}
    for name in ("rmpad", "packed"):
        assert [row["phase"] for row in measured if row["mode"] == name] == list(PHASES)
    for row in measured:
        assert (float(row["prompt_tokens"]), float(row["response_tokens"])) == (64.0, 8.0)
        assert float(row["seconds_median"]) > 0
        assert float(row["speedup"]) > 0
    (dedup,) = {float(row["dedup_ratio"]) for row in measured if row["mode"] == "packed"}
    assert dedup == pytest.approx(4 * (64 + 8) / (64 + 4 * 8), rel=0.05), "one prompt, four responses"
