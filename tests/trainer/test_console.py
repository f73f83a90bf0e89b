"""A run's console is short where the mode is on, verl's own where the user asks for it, and put back behind the run."""

from __future__ import annotations

import sys

import pytest
from omegaconf import OmegaConf
from verl.trainer import main_ppo
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.tracking import Tracking

from verl_pg_plugin import upstream
from verl_pg_plugin.reporting.step_table import StepTable
from verl_pg_plugin.trainer.console import console, show_config_shortly

LOGGER = {"trainer": {"logger": ["console", "file"]}}


def logger_of_a_run() -> object:
    return Tracking("project", "name", default_backend="console").logger["console"]


def test_verls_tracking_logs_to_the_table_and_shows_no_bar_of_its_own() -> None:
    with console(OmegaConf.create({**LOGGER, "prefix_grouper": {"console": "short"}}), total_steps=3):
        table = logger_of_a_run()
        assert isinstance(table, StepTable)
        assert table.total_steps == 3
        assert trainer_base.tqdm(total=3).disable
    assert not isinstance(logger_of_a_run(), StepTable)
    assert not trainer_base.tqdm(total=3).disable


def test_a_v0_run_shows_the_same() -> None:
    with console(OmegaConf.create(LOGGER), total_steps=3, v0=True):
        assert isinstance(logger_of_a_run(), StepTable)
        assert ray_trainer.tqdm(total=3).disable
    assert not isinstance(logger_of_a_run(), StepTable)
    assert not ray_trainer.tqdm(total=3).disable


def test_a_run_without_a_console_keeps_verls_progress_bar() -> None:
    with console(OmegaConf.create({"trainer": {"logger": "wandb"}}), total_steps=3):
        assert not trainer_base.tqdm(total=3).disable


def test_a_user_who_wants_all_metrics_gets_verls_logger() -> None:
    with console(OmegaConf.create({**LOGGER, "prefix_grouper": {"console": "full"}}), total_steps=3):
        assert not isinstance(logger_of_a_run(), StepTable)


def test_a_run_that_fails_tells_its_gain_and_puts_the_logger_back(capsys) -> None:
    metrics = {"actor/prefix_grouper/logical_tokens": 8.0, "actor/prefix_grouper/physical_tokens": 4.0}
    run = console(OmegaConf.create(LOGGER), total_steps=3)
    run.__enter__()
    table = logger_of_a_run()
    assert isinstance(table, StepTable)
    table.stream = sys.stdout  # that of the test
    table.log({"critic/score/mean": 0.0, **metrics}, 1)
    error = KeyError("in the middle of a step")
    assert not run.__exit__(KeyError, error, None), "the error goes on"
    assert "4 of 8 rows never computed" in capsys.readouterr().out
    assert not isinstance(logger_of_a_run(), StepTable)


def test_the_config_is_one_line(monkeypatch, caplog) -> None:
    monkeypatch.setattr(main_ppo, "pprint", main_ppo.pprint)  # put back behind the test
    upstream.show_config_by(show_config_shortly)
    main_ppo.pprint({"a": {"b": 1, "c": [1, 2]}, "d": "x"})
    (record,) = caplog.records
    assert record.message.startswith("config: 3 settings, in .hydra/config.yaml")


def test_an_entry_point_that_prints_otherwise_is_named(monkeypatch) -> None:
    monkeypatch.delattr(main_ppo, "pprint")
    with pytest.raises(upstream.UpstreamChangedError, match=r"prefix_grouper\.console=full"):
        upstream.show_config_by(show_config_shortly)
