"""Trainers of other people, who override the balance or the loop, keep groups together without being changed."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig
from verl import DataProto

from tests.trainer.test_v0 import Stock, make_batch, ranks
from verl_pg_plugin.trainer import keep_groups


class OwnBalanceV0(Stock):
    """Overrides the balance without asking verl's, and hands back another batch with its longest rows first."""

    def _balance_batch(self, batch: DataProto, metrics: dict, *args: Any, **kwargs: Any) -> DataProto:
        order = batch.batch["attention_mask"].sum(dim=1).argsort(descending=True)
        metrics["own/balanced"] = 1
        return batch.select_idxs(order)


class OwnFitV0(Stock):
    """Overrides the loop, and counts optimizer steps in its own way: always two, whatever the batch has."""

    def fit(self, batch: DataProto, balance: bool = True) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        if balance:
            self._balance_batch(batch, metrics)
        self._update_actor(batch)
        return metrics

    def _update_actor(self, batch: DataProto) -> DataProto:
        self.actor_rollout_wg.updated.append(batch)
        names = "logical", "physical", "padding"
        return DataProto(meta_info={"metrics": {f"actor/prefix_grouper/{name}_tokens": 4.0 for name in names}})


def test_a_v0_trainers_own_balance_runs_and_its_batch_gets_whole_groups(make_config: Callable[..., DictConfig]) -> None:
    trainer = keep_groups(OwnBalanceV0)(make_config())
    metrics: dict[str, Any] = {}
    balanced = trainer._balance_batch(make_batch("abababab", [3, 30, 40, 4, 20, 5, 6, 10]), metrics)
    assert metrics["own/balanced"] == 1
    assert metrics["prefix_grouper/balance/cut_groups"] == 2, "two groups of four rows in mini-batches of two a rank"
    assert sorted(balanced.batch["row"].tolist()) == list(range(8))
    for rank in ranks(balanced):
        assert all(len(set(part)) == 1 for part in (rank[:2], rank[2:]))


def test_a_loop_of_ones_own_finds_whole_groups_in_mini_batches_of_ones_own(
    make_config: Callable[..., DictConfig],
) -> None:
    trainer = keep_groups(OwnFitV0, num_mini_batches=lambda trainer, batch_size: 2)(make_config())
    batch = make_batch("abcdabcd" * 3, [7] * 24)
    metrics = trainer.fit(batch)
    assert trainer.actor_rollout_wg.updated == [batch]
    assert metrics["prefix_grouper/balance/cut_groups"] == 0
    for rank in ranks(batch):
        assert all(len(set(part)) == 1 for part in (rank[:6], rank[6:])), "six rows a group, two steps a rank"


def test_a_loop_that_never_balances_is_warned_about_once(
    make_config: Callable[..., DictConfig], caplog: pytest.LogCaptureFixture
) -> None:
    trainers = [keep_groups(OwnFitV0)(make_config()) for _ in range(2)]
    batch = make_batch("aabb", [7] * 4)
    with caplog.at_level(logging.WARNING):
        for balance, trainer in zip((True, False), trainers, strict=True):
            for _ in range(2):
                trainer.fit(batch, balance)
    (record,) = caplog.records
    assert "OwnFitV0 updates its actor with a batch that never went through _balance_batch" in record.getMessage()
    assert "trainer.balance_batch=True" in record.getMessage()


def test_wrapping_twice_or_deriving_from_a_wrapped_class_wraps_once() -> None:
    wrapped = keep_groups(OwnFitV0)
    update = OwnFitV0._update_actor
    assert keep_groups(wrapped) is wrapped is OwnFitV0
    assert OwnFitV0._update_actor is update
    assert "_update_actor" not in vars(keep_groups(type("Derived", (wrapped,), {})))


def test_a_class_of_neither_line_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"builtins.dict is derived from neither verl.trainer.ppo.v1"):
        keep_groups(dict)
