"""Everything that can be known before Ray is said before Ray, in one list, by both entry points and the doctor."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from config_support import TINY, compose_config, save_checkpoint, save_data
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig
from transformers import BloomConfig, Gemma2Config
from wrong_settings import ACTOR, MODEL, ROLLOUT, WRONG, Wrong

from verl_pg_plugin.cli.doctor.overrides import settings
from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.before_ray import prompts
from verl_pg_plugin.config.validate import everything

TOGETHER = (f"{ROLLOUT}.temperature=0", "algorithm.adv_estimator=grop", "data.prompt_key=question")
FLAGS = (f"{ACTOR}.use_prefix_grouper=True", f"{MODEL}.use_remove_padding=True")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that ``{folder}`` in the table leads to."""
    folder = tmp_path_factory.mktemp("wrong")
    save_data(folder / "rows.parquet")
    save_data(folder / "strings.parquet", prompt=["two and two"] * 8)
    save_data(folder / "no_source.parquet", data_source=None)
    save_data(folder / "no_truth.parquet", reward_model=[{"style": "rule"}] * 8)
    pq.write_table(pq.read_table(folder / "rows.parquet").slice(0, 0), folder / "empty.parquet")
    save_checkpoint(folder / "gemma2", Gemma2Config(**TINY))
    save_checkpoint(folder / "bloom", BloomConfig(hidden_size=TINY["hidden_size"], n_head=TINY["num_attention_heads"]))
    (folder / "rows.csv").write_text("prompt\n")
    (folder / "broken.parquet").write_text("PAR0")
    (folder / "lines.jsonl").write_text('{"question": "2+2", "data_source": "a", "reward_model": {}}\n')
    (folder / "reward.py").write_text("def score(data_source, solution_str, ground_truth, extra_info): ...\n")
    (folder / "broken.py").write_text("def score(:\n")
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def typed(runnable_overrides: list[str], folder: Path):
    """The runnable overrides with those of one row in their place."""

    def overrides(row: Wrong) -> list[str]:
        mine = [override.replace("{folder}", str(folder)) for override in row.overrides]
        keys = {override.lstrip("+").partition("=")[0] for override in mine}
        kept = [override for override in runnable_overrides if override.lstrip("+").partition("=")[0] not in keys]
        flags = [flag for flag in FLAGS if flag.partition("=")[0] not in keys]
        return [*kept, *flags, *mine]

    return overrides


@pytest.fixture
def config_of(typed, make_config):
    """The config that the overrides of a row compose, without composing it again."""

    def config(row: Wrong) -> DictConfig:
        parsed = OverridesParser.create().parse_overrides(typed(row))
        return make_config(Mode.PACKED, {override.key_or_group: override.value() for override in parsed})

    return config


def row_id(row: Wrong) -> str:
    return " ".join(row.overrides).replace("actor_rollout_ref.", "")


def test_the_table_is_about_runs_that_start_without_it(runnable_overrides):
    assert len(WRONG) >= 40
    assert everything(compose_config(*runnable_overrides, *FLAGS)) == []


@pytest.mark.parametrize("row", WRONG, ids=row_id)
def test_a_wrong_setting_is_one_violation_that_names_it_the_cause_and_the_fix(config_of, row: Wrong):
    (violation, *others) = everything(config_of(row))
    assert (violation.settings[0].key if violation.settings else "") == row.key
    assert row.why in violation.why
    assert violation.fix.startswith(row.fix or (row.key, f"++{row.key}"))
    assert not others, "one mistake is said once"


def test_every_mistake_is_in_one_list(config_of):
    rows = [row for row in WRONG if row.overrides[0] in TOGETHER]
    assert len(rows) == len(TOGETHER)
    together = Wrong(tuple(override for row in rows for override in row.overrides), "", "")
    said = " ".join(violation.why for violation in everything(config_of(together)))
    assert all(row.why in said for row in rows)


def test_the_doctor_lists_the_same(config_of):
    row = next(row for row in WRONG if row.overrides == ("data.train_files=no_such.parquet",))
    config = config_of(row)
    assert [problem.fix for problem in settings(config).problems] == [found.fix for found in everything(config)]


def test_a_folder_to_dump_to_need_not_be_there_and_must_be_writable(config_of, tmp_path, monkeypatch):
    folder = tmp_path / "made" / "later"
    row = Wrong((f"trainer.rollout_data_dir={folder}",), "", "")
    assert everything(config_of(row)) == []
    monkeypatch.setattr("verl_pg_plugin.config.before_ray.files.os.access", lambda path, mode: path != tmp_path)
    (found,) = everything(config_of(row))
    assert f"{tmp_path} cannot be written to" in found.why
    assert found.fix == "trainer.rollout_data_dir=<folder>"


def test_a_folder_to_dump_to_is_no_link_that_leads_nowhere_and_has_no_file_where_lengths_go(config_of, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "lengths").touch()
    for folder, named in ((tmp_path / "link" / "dumps", "link"), (tmp_path, "lengths")):
        (found,) = everything(config_of(Wrong((f"trainer.rollout_data_dir={folder}",), "", "")))
        assert f"{tmp_path / named} is no folder" in found.why
    assert everything(config_of(Wrong((f"trainer.validation_data_dir={tmp_path}",), "", ""))) == [], "has no lengths"


def test_a_filter_that_takes_too_long_to_tell_is_left_to_verl(config_of, monkeypatch):
    row = next(row for row in WRONG if "data.max_prompt_length=2" in row.overrides)
    monkeypatch.setattr(prompts, "DEADLINE_S", -1.0)
    assert everything(config_of(row)) == []


def run_entry_point(module: str, overrides: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    if module == "verl.trainer.main_ppo":  # its config has no section of ours
        overrides = [f"+{override}" if override.startswith("prefix_grouper.") else override for override in overrides]
    return subprocess.run(
        [sys.executable, "-m", module, f"hydra.run.dir={tmp_path}", *overrides],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=60,
    )


def seconds_of_children() -> float:
    """CPU time, which a busy machine does not stretch; a process that looks before Ray runs on one core."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def assert_ends_before_ray(module: str, row: Wrong, overrides: list[str], tmp_path: Path) -> None:
    before = seconds_of_children()
    result = run_entry_point(module, overrides, tmp_path)
    assert seconds_of_children() - before < 20
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    said = result.stderr[result.stderr.index("1 problem in the configuration, nothing was started:") :].splitlines()
    assert said[1].startswith(f"1. {row.key}"), said
    assert row.why in said[2]
    assert "ray init kwargs" not in result.stdout


def test_both_entry_points_end_with_the_list_before_ray_starts(typed, tmp_path):
    for module, row in (("verl_pg_plugin.main_ppo", WRONG[0]), ("verl.trainer.main_ppo", WRONG[-3])):
        assert_ends_before_ray(module, row, typed(row), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "row"), enumerate(WRONG), ids=[row_id(row) for row in WRONG])
def test_every_row_ends_a_process_in_time(typed, tmp_path, number: int, row: Wrong):
    module = ("verl_pg_plugin.main_ppo", "verl.trainer.main_ppo")[number % 2]
    assert_ends_before_ray(module, row, typed(row), tmp_path)


def test_a_batch_may_be_all_of_the_data(config_of):
    assert everything(config_of(Wrong(("data.train_batch_size=8",), "", ""))) == []


def test_a_setting_that_two_checks_object_to_is_listed_once(config_of):
    """Three ranks neither divide the heads of the model nor are there."""
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    assert [found.settings[0].key for found in everything(config_of(Wrong((f"{key}=3",), "", "")))] == [key]
