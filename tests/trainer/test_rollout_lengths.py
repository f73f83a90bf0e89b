"""Where a run dumps its rollouts, trainers that keep groups leave exact lengths, from which ``estimate`` predicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig

from tests.support import make_engine, save_tiny_model
from tests.trainer.test_v0 import Stock, make_batch
from tests.trainer.test_v1 import Batch, StockTrainer
from verl_pg_plugin import synthetic
from verl_pg_plugin.__main__ import main
from verl_pg_plugin.trainer import keep_groups

STEP = 7


@pytest.fixture
def dumping(make_config: Callable[..., DictConfig], tmp_path: Path) -> DictConfig:
    return make_config(trainer__rollout_data_dir=str(tmp_path / "rollouts"))


def written(tmp_path: Path) -> list[dict[str, Any]]:
    (file,) = (tmp_path / "rollouts").rglob("*.jsonl")
    assert file == tmp_path / "rollouts" / "lengths" / f"{STEP}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def balanced_v1(config: DictConfig, batch: Batch) -> Batch:
    trainer = keep_groups(StockTrainer)(config)
    trainer.global_steps = STEP
    trainer._balance_batch(batch, {})
    return batch


def test_a_v1_trainer_writes_its_rows_as_ranks_hold_them_under_the_uids_of_verls_dump(dumping, tmp_path: Path) -> None:
    keys = [f"{uid}_{session}_0" for session in (0, 1) for uid in ("a_x", "b", "c", "d")]
    batch = balanced_v1(dumping, Batch(keys, responses=[40, 2, 5, 30, 8, 2, 9, 1]))
    records = written(tmp_path)
    assert [f"{line['uid']}_{line['session']}_{line['turn']}" for line in records] == [keys[row] for row in batch.order]
    lengths = [(tag["prompt_len"], tag["response_len"]) for tag in batch.tags]
    assert [(line["prompt_len"], line["response_len"]) for line in records] == [lengths[row] for row in batch.order]
    assert {line["step"] for line in records} == {STEP}


def test_filler_of_verls_is_nobodys_rollout(dumping: DictConfig, tmp_path: Path) -> None:
    batch = Batch(["a_0_0", "a_1_0", "pad_0_0", "pad_1_0"], responses=[3] * 4)
    for tag in batch.tags[2:]:
        tag["is_padding"] = True
    balanced_v1(dumping, batch)
    assert [line["uid"] for line in written(tmp_path)] == ["a", "a"]


def test_a_v0_trainer_writes_its_rows_as_ranks_hold_them_without_padding(dumping: DictConfig, tmp_path: Path) -> None:
    trainer, responses = Stock(dumping), [3, 9, 4, 4, 30, 2, 8, 8, 1, 40, 6, 6]
    trainer.global_steps = STEP
    batch = make_batch("aabbccddeeff", responses, prompt=9)
    trainer._balance_batch(batch, {})
    records, order = written(tmp_path), batch.batch["row"].tolist()
    assert [line["uid"] for line in records] == ["aabbccddeeff"[row] for row in order]
    assert [line["response_len"] for line in records] == [responses[row] for row in order]
    assert {line["prompt_len"] for line in records} == {9}


def test_a_run_without_the_setting_or_without_sharing_writes_nothing(
    make_config: Callable[..., DictConfig], dumping: DictConfig, tmp_path: Path
) -> None:
    keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    balanced_v1(make_config(), Batch(keys, responses=[3] * 4))
    dumping.actor_rollout_ref.actor.use_prefix_grouper = False
    balanced_v1(dumping, Batch(keys, responses=[3] * 4))
    assert not (tmp_path / "rollouts").exists()


class Rollouts:
    """Rows whose responses begin with different tokens, as those of a model with a large vocabulary mostly do."""

    def __init__(self) -> None:
        self.rng, self.firsts = np.random.default_rng(0), iter(range(96))
        self.keys: list[str] = []
        self.samples: list[synthetic.Sample] = []

    def row(self, key: str, prompt: list[int], response_length: int) -> list[int]:
        response = [next(self.firsts), *self.rng.integers(96, size=response_length - 1).tolist()]
        self.keys.append(key)
        self.samples.append(synthetic.Sample(prompt, response))
        return prompt + response

    def prompt(self, number: int, common: list[int], length: int) -> list[int]:
        return [*common, number, *self.rng.integers(96, size=length - len(common) - 1).tolist()]


def plain_groups(rollouts: Rollouts) -> None:
    for number, length in enumerate((21, 40, 13, 30)):
        prompt = rollouts.prompt(number, [], length)
        for session in range(6):
            rollouts.row(f"g{number}_{session}_0", prompt, int(rollouts.rng.integers(1, 20)))


def turns_behind_a_system_prompt(rollouts: Rollouts) -> None:
    for number in range(4):
        prompt = rollouts.prompt(number, [5, 6, 7, 8, 9], 14)
        for session in range(2):
            context = prompt
            for turn in range(1 + (number + session) % 2):
                context = rollouts.row(f"g{number}_{session}_{turn}", context, 6)
                context = context + rollouts.rng.integers(96, size=3).tolist()


@pytest.mark.parametrize("rollouts_of", [plain_groups, turns_behind_a_system_prompt])
def test_what_is_predicted_from_lengths_is_what_the_engine_then_computes(
    rollouts_of: Callable[[Rollouts], None],
    dumping: DictConfig,
    stored_prompts: dict[str, list[int]],
    process_group: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rollouts = Rollouts()
    rollouts_of(rollouts)
    stored_prompts.update({k.split("_")[0]: s.prompt for k, s in zip(rollouts.keys, rollouts.samples, strict=True)})
    batch = Batch(rollouts.keys, responses=[len(sample.response) for sample in rollouts.samples])
    for tag, sample in zip(batch.tags, rollouts.samples, strict=True):
        tag["prompt_len"] = len(sample.prompt)
    dumping.actor_rollout_ref.actor.ppo_mini_batch_size = len(batch.keys) // 2
    balanced_v1(dumping, batch)

    model, figures = save_tiny_model(tmp_path / "model"), tmp_path / "figures.json"  # it has no tokenizer
    asked = ["--model", model, "--rollouts", str(tmp_path / "rollouts"), "--budget", "4096", "--json", str(figures)]
    assert main(["estimate", *asked]) == 0
    assert f"4 of 4 groups of lengths/{STEP}.jsonl: exact lengths" in capsys.readouterr().out
    (predicted,) = json.loads(figures.read_text())

    engine = make_engine(model, packed=True)
    with engine.eval_mode():
        metrics = engine.infer_batch(synthetic.make_batch(rollouts.samples))["metrics"]
    assert [predicted["logical_tokens"]] == metrics["prefix_grouper/logical_tokens"]
    assert [predicted["physical_tokens"]] == metrics["prefix_grouper/physical_tokens"]
    assert [predicted["dedup_ratio"]] == metrics["prefix_grouper/dedup_ratio"]
    assert predicted["dedup_ratio"] > 1.5, "where nothing is shared any lengths would do"
