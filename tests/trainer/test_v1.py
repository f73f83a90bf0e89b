"""V1 trainers find batches in which the rows of one prompt meet on one rank and in one mini-batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1 import trainer_base as verls

from tests.trainer.workers import Workers
from verl_pg_plugin import plugin
from verl_pg_plugin.trainer import keep_groups
from verl_pg_plugin.trainer.groups import _common_tokens_v1

VERLS = {"sync": PPOTrainerSync, "colocate_async": PPOTrainerColocateAsync, "separate_async": PPOTrainerSeparateAsync}


class StockTrainer(PPOTrainer):
    """verl's trainer without what its ``__init__`` builds; pads nothing, and leaves the batch as dispatch did."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.actor_rollout_wg = Workers()

    def _balance_batch(self, batch: Any, metrics: dict, logging_prefix: str = "", keep_minibatch: bool = False) -> Any:
        return batch

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None: ...


class Batch:
    """The parts of a ``KVBatchMeta`` that a balance reads, and what it was reordered to."""

    partition_id = "train"

    def __init__(self, keys: list[str], responses: list[int]) -> None:
        self.keys, self.order = keys, list(range(len(keys)))
        self.tags = [{"prompt_len": 8, "response_len": n, "seq_len": 8 + n} for n in responses]

    def reorder(self, order: list[int]) -> None:
        self.order = order

    def ranks(self) -> list[list[str]]:
        return [[self.keys[i] for i in part] for part in np.split(np.array(self.order), 2)]


@pytest.fixture
def trainer(make_config: Callable[..., DictConfig]) -> Any:
    return keep_groups(StockTrainer)(make_config())


def test_verls_task_runner_finds_the_group_keeping_class_of_each_mode_under_its_prefix() -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls  # as the task runner imports it, when it runs

    for mode, verls_class in VERLS.items():
        assert get_trainer_cls(f"pg_{mode}") is keep_groups(verls_class)
        assert issubclass(get_trainer_cls(f"pg_{mode}"), verls_class)
        assert get_trainer_cls(mode) is verls_class, "verl's own entry stays as it is"


def test_a_trainer_that_somebody_registers_later_is_found_with_groups_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls

    monkeypatch.setattr(verls, "TRAINER_REGISTRY", dict(verls.TRAINER_REGISTRY))
    foreign = type("Foreign", (StockTrainer,), {})
    verls.register_trainer("foreign")(foreign)
    assert get_trainer_cls("pg_foreign") is keep_groups(foreign)
    own = verls.register_trainer("pg_own")(type("Own", (StockTrainer,), {}))
    assert get_trainer_cls("pg_own") is own, "a name of somebody's own that begins like ours stays theirs"
    with pytest.raises(ValueError, match=r"Unknown trainer 'fast'. Available trainers: colocate_async, "):
        get_trainer_cls("pg_fast")


@pytest.mark.parametrize("gone", [True, False])
def test_an_import_of_a_verl_without_the_look_up_warns_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: bool
) -> None:
    from verl.trainer.ppo import v1

    monkeypatch.setattr(v1, "get_trainer_cls", lambda name, config: None)
    if gone:
        monkeypatch.delattr(v1, "get_trainer_cls")
    plugin._keep_groups_in_v1()
    assert "trainers of this verl are left alone: verl.trainer.ppo.v1.get_trainer_cls" in caplog.text
    assert ("is gone; tested with verl" if gone else "now takes (name, config); tested with verl") in caplog.text


def test_sequences_with_one_uid_go_to_one_rank_whatever_follows_it_in_their_keys(trainer: Any) -> None:
    keys = ["a_x_0_0", "b_x_0_0", "a_x_1_0", "b_x_1_1"]
    batch, metrics = Batch(keys, responses=[5, 5, 5, 5]), {}
    assert trainer.config.trainer.v1.trainer_mode == "sync", "what verl compares the mode with"
    assert trainer._balance_batch(batch, metrics) is batch
    assert sorted(map(sorted, batch.ranks())) == [["a_x_0_0", "a_x_1_0"], ["b_x_0_0", "b_x_1_1"]]
    assert metrics["prefix_grouper/balance/cut_groups"] == 0
    assert metrics["prefix_grouper/balance/slowest_over_mean"] == pytest.approx(1)
    assert metrics["global_seqlen/balanced_max"] == 26


def test_a_system_prompt_that_all_prompts_begin_with_is_counted_once_a_rank(
    trainer: Any, stored_prompts: dict[str, list[int]]
) -> None:
    keys = [f"{uid}_{session}_0" for uid in "abcd" for session in (0, 1)]
    rows = {}
    for shared in (0, 6):
        stored_prompts.update({uid: [*range(shared), number + 10] for number, uid in enumerate("abcd")})
        batch, metrics = Batch(keys, responses=[3] * 8), {}
        trainer._balance_batch(batch, metrics)
        rows[shared] = metrics["prefix_grouper/balance/estimated_rows"]
    whole = 4 * (7 + 2 * 3)  # prompts of 8 tokens are 7 rows
    assert rows[0] == whole / 2, "the mean of two mini-batches"
    assert rows[6] == rows[0], "each of the four mini-batches of two ranks holds one group, and computes it alone"
    metrics = {}
    trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size = 4
    trainer._balance_batch(Batch(keys, responses=[3] * 8), metrics)
    assert metrics["prefix_grouper/balance/estimated_rows"] == whole - 2 * 5, "two groups in each of two cells"


def test_filler_rows_say_nothing_about_prompts(stored_prompts: dict[str, list[int]]) -> None:
    stored_prompts.update(a=list(range(8)), pad0=list(range(8)))
    batch = Batch(["a_0_0", "a_1_0", "pad0_0_0", "pad0_1_0"], responses=[3] * 4)
    assert _common_tokens_v1(batch, ["a", "a", "pad0", "pad0"]) == 8
    for tag in batch.tags[2:]:
        tag["is_padding"] = True
    assert _common_tokens_v1(batch, ["a", "a", "pad0", "pad0"]) == 0


def test_estimated_rows_are_held_against_those_that_were_computed(trainer: Any, monkeypatch: Any) -> None:
    def update(self: Any, batch: Any, metrics: dict[str, float]) -> Any:
        metrics.update({"actor/prefix_grouper/physical_tokens": 30.0, "actor/prefix_grouper/padding_tokens": 4.0})
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    batch, metrics = Batch(["a_0_0", "a_1_0", "b_0_0", "b_1_0"], responses=[3] * 4), {}
    trainer._balance_batch(batch, metrics)
    trainer._update_actor(batch, metrics)
    assert metrics["prefix_grouper/balance/estimated_over_real_rows"] == (2 * (7 + 2 * 3)) / 26


def test_turns_of_a_session_continue_each_other_in_whatever_order_they_come(trainer: Any) -> None:
    """The second row of each session has all of the first as its prompt: two rows more, for its response."""
    batch, metrics = Batch(["a_0_1", "a_0_0", "b_7_1", "b_7_0"], responses=[2, 3, 2, 3]), {}
    for tag in batch.tags[::2]:
        tag["prompt_len"] = 11
    trainer._balance_batch(batch, metrics)
    assert metrics["prefix_grouper/balance/estimated_rows"] == 2 * (10 + 2)
