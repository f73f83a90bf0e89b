"""The main job on real parts: verl's V1 trainer, Ray, TransferQueue, FSDP2 and Hydra, for two steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_pg_plugin.config import Mode

REPOSITORY = Path(__file__).parent.parent
# What a process that dies of an exception or a signal leaves in the log of a run.
DEATHS = re.compile(r"Traceback \(most recent call last\)|is killed by signal|\*\*\* SIG[A-Z]+ received")
PICTURES = "run_qwen3_vl_pg.sh"
MADE: dict[str, Path] = {}
"""Checkpoints and data of the arithmetic task: they take as long as a step to make, and later runs read them."""

pytestmark = pytest.mark.timeout(600)


def train(
    folder: Path, *overrides: str, script: str = "run_qwen3_pg.sh", **environment: str
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Run a script of ``examples/``; its summary line and the metrics of each step. ``folder`` gets a console.log."""
    variables = {"WORK_DIR": str(folder), "TOTAL_STEPS": "2", "TRAIN_BATCH_SIZE": "8", "PPO_MINI_BATCH_SIZE": "4"}
    folder.mkdir(exist_ok=True)
    for name, made in MADE.items():
        if script != PICTURES and not (folder / name).exists():
            (folder / name).symlink_to(made)
    result = subprocess.run(
        ["bash", f"examples/{script}", *overrides],
        cwd=REPOSITORY,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (folder / "console.log").write_text(result.stdout + result.stderr)
    if script != PICTURES:
        MADE.update({made.name: made.resolve() for made in (*folder.glob("model-*"), *folder.glob("data"))})
    (summary,) = (line for line in result.stdout.splitlines() if line.startswith("run summary: "))
    assert result.stdout.splitlines()[-1] == summary
    assert not [line for line in (result.stdout + result.stderr).splitlines() if DEATHS.search(line)]
    (metrics,) = folder.glob("*/metrics.jsonl")
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return json.loads(summary.removeprefix("run summary: ")), steps


def test_two_commands_of_the_readme_train_in_packed_mode(tmp_path: Path) -> None:
    summary, steps = train(tmp_path)
    assert summary["steps"] == 2
    assert summary["mode"] == Mode.PACKED.value
    assert summary["attention_backend"] == "sdpa"
    assert summary["dedup_ratio"] > 8, "eight responses share each prompt, and all prompts one preamble"
    for name in ("reward_first", "reward_last", "time_old_log_prob", "time_update_actor"):
        assert summary[name] > 0
    for step in steps:
        logical, physical = (step[f"actor/prefix_grouper/{kind}_tokens"] for kind in ("logical", "physical"))
        assert logical / physical > 8
        assert step["prefix_grouper/balance/cut_groups"] == 0
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout's log-probs are those of the engine"


@pytest.mark.slow
def test_mixture_of_experts_trains_in_packed_mode(tmp_path: Path) -> None:
    summary, steps = train(tmp_path, ARCHITECTURE="qwen3_moe")
    assert json.loads((tmp_path / "model-qwen3_moe" / "config.json").read_text())["model_type"] == "qwen3_moe"
    assert summary["mode"] == Mode.PACKED.value
    for step in steps:
        assert step["actor/prefix_grouper/dedup_ratio"] > 8
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout visits the experts that the engine visits"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "mode", "role", "least"),
    [
        ("run_qwen3_prefix_grouper.sh", Mode.PADDED_GROUPS, "actor", 4),
        ("run_qwen3_ppo_pg.sh", Mode.PACKED, "critic", 8),
    ],
)
def test_upstreams_padded_groups_and_critics_train(tmp_path: Path, script, mode, role, least) -> None:
    summary, steps = train(tmp_path, script=script)
    assert summary["mode"] == mode.value
    for step in steps:
        assert step[f"{role}/prefix_grouper/dedup_ratio"] > least
        assert step[f"{role}/grad_norm"] > 0


# Daily, the V0 run of tests/trainer has two workers and verl's entry point, and tests/trainer/test_v1.py whole groups.
@pytest.mark.slow
def test_verls_own_entry_point_keeps_groups_whole_with_two_workers_and_asynchronous_rollouts(tmp_path: Path) -> None:
    entry_point = "verl.trainer.main_ppo"  # the other tests run ours
    overrides = ("trainer.v1.trainer_mode=colocate_async", "+prefix_grouper.logits_chunk_size=64")
    summary, steps = train(tmp_path, *overrides, ENTRY_POINT=entry_point, NGPUS_PER_NODE="2")
    assert summary["mode"] == Mode.PACKED.value
    for step in steps:
        assert step["prefix_grouper/balance/cut_groups"] == 0
        assert 1 <= step["prefix_grouper/balance/slowest_over_mean"] < 1.5
        assert step["actor/prefix_grouper/dedup_ratio"] > 8


@pytest.mark.slow
def test_sessions_with_one_row_per_turn_train_as_tries(tmp_path: Path) -> None:
    """Every micro-batch is held against rows computed alone."""
    verify = "prefix_grouper.verify=every_1"
    summary, steps = train(tmp_path, verify, script="run_qwen3_agent_pg.sh", NGPUS_PER_NODE="2", TOTAL_STEPS="3")
    assert summary["mode"] == Mode.PACKED.value
    for step in steps:
        assert step["num_turns/max"] > step["num_turns/min"] == 2, "some sessions need several rows"
        assert step["actor/prefix_grouper/dedup_ratio"] > 4
        assert step["actor/prefix_grouper/verify_max_error"] < 1e-4
        assert step["actor/prefix_grouper/verified_rows"] > 0
        assert 0.8 < step["prefix_grouper/balance/estimated_over_real_rows"] < 1.3
        assert 1 <= step["prefix_grouper/balance/slowest_over_mean"] < 1.1
        assert step["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.slow
def test_a_hybrid_of_recurrence_and_attention_trains_in_packed_mode(tmp_path: Path) -> None:
    scripts, files = REPOSITORY / "scripts", {}
    commands = {
        "MODEL_PATH": ["make_tiny_checkpoint.py", "--architecture", "qwen3_5_text", "--warm-up-steps", "20"],
        "TRAIN_FILES": ["make_arithmetic_data.py"],
    }
    for name, (script, *options) in commands.items():
        files[name] = str(tmp_path / name)
        subprocess.run([sys.executable, scripts / script, "--output-dir", files[name], *options], check=True)
    data = {"TRAIN_FILES": f"{files['TRAIN_FILES']}/train.parquet", "VAL_FILES": f"{files['TRAIN_FILES']}/test.parquet"}
    summary, steps = train(tmp_path / "run", DEVICE="cpu", **{**files, **data})
    assert summary["mode"] == Mode.PACKED.value
    for step in steps:
        assert step["actor/prefix_grouper/dedup_ratio"] > 8
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout's log-probs are those of the engine"


@pytest.mark.slow
def test_pictures_go_through_the_tower_once_and_the_rollout_sees_them(tmp_path: Path) -> None:
    summary, steps = train(tmp_path, script=PICTURES, ROLLOUT_N="4")
    assert summary["mode"] == Mode.PACKED.value
    for step in steps:
        # Pictures of equal squares at equal places may meet in one micro-batch.
        assert step["actor/prefix_grouper/logical_patches"] >= 4 * step["actor/prefix_grouper/patches"] > 0
        assert step["actor/prefix_grouper/dedup_ratio"] > 4
        assert step["actor/grad_norm"] > 0
        # The rollout leaves placeholders out, which the engine's softmax counts.
        assert step["training/rollout_probs_diff_max"] < 5e-3, "the rollout's log-probs are those of the engine"
