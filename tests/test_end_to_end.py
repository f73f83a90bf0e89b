"""End to end: verl's V1 trainer, Ray, TransferQueue, FSDP2 and Hydra, for two steps."""

import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from smoke_runs import DEATHS

from tests.fresh import python
from verl_pg_plugin.config import Mode

REPOSITORY, PLAIN, IMAGES = Path(__file__).parent.parent, "run_qwen3_pg.sh", "run_qwen3_vl_pg.sh"
MADE: dict[str, Path] = {}
"""Checkpoints and data of the arithmetic task, which later runs reuse."""
ONE_UPDATE = {"TRAIN_BATCH_SIZE": "4", "PPO_MINI_BATCH_SIZE": "4"}
"""A step is one update, which provides the old log-probs."""
OLD_LOG_PROBS = "separate forward for old log-probs: none by the configuration, they are those of the update"

pytestmark = pytest.mark.timeout(600)


@cache
def checkout() -> Path:
    """The repository, with ``tests.fresh.python`` in place of .venv: scripts start in a second."""
    folder = Path(python()).parent / "checkout"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(python())
    for name in (".venv/.installed", "constraints.txt", "examples", "pyproject.toml", "scripts", "verl_pg_plugin"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def train(
    folder: Path, *overrides: str, script: str = PLAIN, **environment: str
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Run a script of ``examples/``, with its output in ``folder``/console.log.

    Returns:
        The run summary, and the metrics of each step.
    """
    variables = {"WORK_DIR": str(folder), "TOTAL_STEPS": "2", "TRAIN_BATCH_SIZE": "8", "PPO_MINI_BATCH_SIZE": "4"}
    folder.mkdir(exist_ok=True)
    if script == PLAIN and "model-qwen3" not in MADE:  # the script would train it four times as long
        make = "scripts/make_tiny_checkpoint.py", "--output-dir", str(folder / "model-qwen3"), "--warm-up-steps", "20"
        subprocess.run([python(), *make], cwd=REPOSITORY, check=True)
    for name, made in MADE.items():
        if (script == PLAIN or (script != IMAGES and name == "data")) and not (folder / name).exists():
            (folder / name).symlink_to(made)
    of_workers = f"++ray_kwargs.ray_init.runtime_env.py_executable={python()}"
    in_process = "++data.filter_overlong_prompts_workers=null"  # by default two pools start
    result = subprocess.run(
        ["bash", f"{checkout()}/examples/{script}", of_workers, in_process, *overrides],
        cwd=REPOSITORY,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (folder / "console.log").write_text(result.stdout + result.stderr)
    if script != IMAGES:
        MADE.update({made.name: made.resolve() for made in (*folder.glob("model-*"), *folder.glob("data"))})
    (summary,) = (line for line in result.stdout.splitlines() if line.startswith("run summary: "))
    assert result.stdout.splitlines()[-1] == summary
    assert not [line for line in (result.stdout + result.stderr).splitlines() if DEATHS.search(line)]
    (metrics,) = folder.glob("*/metrics.jsonl")
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return json.loads(summary.removeprefix("run summary: ")), steps


def assert_shared(steps: list[dict[str, float]], least: float, tolerance: float | None = 1e-4) -> None:
    """Every step trains with at least this dedup ratio, and log-probs of rollout and engine agree."""
    for step in steps:
        assert step["actor/prefix_grouper/dedup_ratio"] > least
        assert step["actor/grad_norm"] > 0
        if tolerance is not None:
            assert step["training/rollout_probs_diff_max"] < tolerance


def test_the_readme_example_trains_in_packed_mode(tmp_path: Path) -> None:
    # Without a reference policy, only old log-probs would be a forward of their own.
    overrides = "actor_rollout_ref.actor.use_kl_loss=False", "prefix_grouper.verify=every_1"
    summary, steps = train(tmp_path, *overrides, **ONE_UPDATE)
    assert summary["steps"] == 2
    assert summary["mode"] == Mode.PACKED.value
    assert summary["attention_backend"] == "sdpa"
    assert summary["dedup_ratio"] > 8, "eight responses share each prompt, and all prompts a preamble"
    for name in ("reward_first", "reward_last", "time_old_log_prob", "time_update_actor"):
        assert summary[name] > 0
    assert_shared(steps, least=8)
    shown = (tmp_path / "console.log").read_text()
    assert OLD_LOG_PROBS in shown
    assert "update mini-batch verified" in shown
    assert "forward-only mini-batch verified" not in shown
    for step in steps:
        assert step["prefix_grouper/balance/cut_groups"] == 0
        assert step["actor/ppo_kl"] == step["actor/pg_clipfrac"] == 0, "the ratio is exactly 1"
        assert step["actor/entropy"] > 0
        assert abs(step["rollout_corr/kl"]) < 1e-4
        assert all(map(math.isfinite, step.values())), "every NaN is replaced"


# Daily, the V0 run of tests/trainer has two workers, verl's entry point and a reference policy, and
# tests/trainer/test_v1.py several mini-batches of whole groups.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "mode", "least"),
    [
        ({"ARCHITECTURE": "qwen3_moe"}, Mode.PACKED, 8),
        ({"ARCHITECTURE": "qwen3_5_text"}, Mode.PACKED, 8),
        ({"script": "run_qwen3_prefix_grouper.sh"}, Mode.PADDED_GROUPS, 4),
        ({"script": IMAGES, "ROLLOUT_N": "4"}, Mode.PACKED, 4),
    ],
    ids=["mixture of experts", "hybrid", "padded groups", "images"],
)
def test_examples_share_tokens_and_rollout_and_engine_agree(
    tmp_path: Path, environment: dict[str, str], mode: Mode, least: float
) -> None:
    summary, steps = train(tmp_path, **environment)
    assert summary["mode"] == mode.value
    if architecture := environment.get("ARCHITECTURE"):
        config = json.loads((tmp_path / f"model-{architecture}" / "config.json").read_text())
        assert config["model_type"] == architecture
    with_images = environment.get("script") == IMAGES
    # The rollout's softmax excludes image placeholders, unlike the engine's.
    assert_shared(steps, least, tolerance=5e-3 if with_images else 1e-4)
    for step in steps:
        if mode is Mode.PACKED:
            assert step["prefix_grouper/balance/cut_groups"] == 0
            assert 1 <= step["prefix_grouper/balance/slowest_over_mean"] < 1.5
        if with_images:  # equal images may be in one micro-batch
            assert step["actor/prefix_grouper/total_patches"] >= 4 * step["actor/prefix_grouper/patches"] > 0


@pytest.mark.slow
def test_sessions_with_a_sequence_per_turn_train_as_prefix_trees(tmp_path: Path) -> None:
    options = {"script": "run_qwen3_agent_pg.sh", "NGPUS_PER_NODE": "2", "TOTAL_STEPS": "3"}
    summary, steps = train(tmp_path, "prefix_grouper.verify=every_1", **options)
    assert summary["mode"] == Mode.PACKED.value
    assert_shared(steps, least=4)
    for step in steps:
        assert step["num_turns/max"] > step["num_turns/min"] == 2, "some sessions need several sequences"
        assert step["actor/prefix_grouper/verify_max_error"] < 1e-4
        assert step["actor/prefix_grouper/verified_sequences"] > 0
        assert 0.8 < step["prefix_grouper/balance/estimated_over_computed_tokens"] < 3, "all prompts share a preamble"
        assert 1 <= step["prefix_grouper/balance/slowest_over_mean"] < 1.1
        assert step["prefix_grouper/rollout/servers_per_prompt"] == 1, "of two"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    sizes = {"TRAIN_BATCH_SIZE": "16", "PPO_MINI_BATCH_SIZE": "8", "TOTAL_STEPS": "20"}
    _, steps = train(tmp_path, script="run_qwen3_distill_pg.sh", **sizes)
    assert_shared(steps, least=8)
    kl = [step["actor/distillation/abs_loss"] for step in steps]
    assert sum(kl[10:]) < 0.95 * sum(kl[:10])


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_smoke_runs_of_tools_adapters_and_critic_succeed(tmp_path: Path) -> None:
    runs = ["tools", "lora", "critic"]
    command = [sys.executable, "scripts/smoke_runs.py", "--runs", *runs, "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    results = [line.split() for line in done.stdout.splitlines() if " ok " in line]
    assert [(line[0], line[3]) for line in results] == [(run, "ok") for run in runs]
