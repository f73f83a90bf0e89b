"""V0 trainers, verl's and custom ones, get whole groups on each rank and in each mini-batch."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

import verl_pg_plugin
from tests.trainer.conftest import Workers
from verl_pg_plugin import upstream
from verl_pg_plugin.trainer import keep_groups

PROMPT, RESPONSE = 12, 40


class Stock(RayPPOTrainer):
    """verl's trainer and its balance, without what its ``__init__`` builds."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.use_prefix_grouper = config.actor_rollout_ref.actor.use_prefix_grouper
        self.actor_rollout_wg = Workers()


class OwnBalanceV0(Stock):
    """Overrides the balance without ``super()`` and returns a new batch, longest rows first."""

    def _balance_batch(self, batch: DataProto, metrics: dict, *args: Any, **kwargs: Any) -> DataProto:
        order = batch.batch["attention_mask"].sum(dim=1).argsort(descending=True)
        metrics["own/balanced"] = 1
        return batch.select_idxs(order)


class OwnFitV0(Stock):
    """Overrides the loop."""

    def fit(self, batch: DataProto, balance: bool = True) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        if balance:
            self._balance_batch(batch, metrics)
        self._update_actor(batch)
        return metrics

    def _update_actor(self, batch: DataProto) -> DataProto:
        self.actor_rollout_wg.updated.append(batch)
        names = "total", "computed", "padding"
        return DataProto(meta_info={"metrics": {f"actor/prefix_grouper/{name}_tokens": 4.0 for name in names}})


def make_batch(uids: str, responses: list[int], prompt: int = 9) -> DataProto:
    """Rows with left-padded prompts and right-padded responses, as V0's agent loop returns them."""
    place = torch.arange(PROMPT + RESPONSE)
    mask = ((place >= PROMPT - prompt) & (place < (torch.tensor(responses)[:, None] + PROMPT))).long()
    tensors = {"prompts": mask[:, :PROMPT], "attention_mask": mask, "row": torch.arange(len(uids))}
    return DataProto.from_dict(tensors, non_tensors={"uid": np.array(list(uids), dtype=object)})


def ranks(batch: DataProto) -> list[list[str]]:
    return [part.tolist() for part in np.split(batch.non_tensor_batch["uid"], 2)]


def assert_whole_groups(batch: DataProto, rows: int) -> None:
    """Both mini-batches, of ``rows`` rows, of each rank hold one group."""
    for rank in ranks(batch):
        assert all(len(set(part)) == 1 for part in (rank[:rows], rank[rows:]))


@pytest.fixture(autouse=True)
def patched() -> None:
    verl_pg_plugin._patch_trainers()


@pytest.fixture
def trainer(config: DictConfig) -> Stock:
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 3
    return Stock(config)


def test_three_groups_are_balanced_over_two_ranks(trainer: Stock) -> None:
    """verl's own balance for the flag raises a ValueError."""
    batch, metrics = make_batch("aabbcc", [5] * 6), {}
    trainer._balance_batch(batch, metrics)
    assert metrics["prefix_grouper/balance/cut_groups"] == 1
    assert sorted(batch.batch["row"].tolist()) == list(range(6))
    first, second = ranks(batch)
    assert len(set(first) & set(second)) == 1, "only one group is on both"


def test_mini_batches_hold_whole_groups_and_are_balanced(trainer: Stock) -> None:
    """verl's own balance puts both long groups into one mini-batch."""
    trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size = 2
    batch, metrics = make_batch("aabbccdd", [40, 40, 40, 40, 2, 2, 2, 2]), {}
    trainer._balance_batch(batch, metrics, logging_prefix="tokens")
    assert metrics["prefix_grouper/balance/cut_groups"] == 0
    assert metrics["prefix_grouper/balance/slowest_over_mean"] == pytest.approx(1)
    assert metrics["tokens/balanced_max"] == 2 * (9 + 40) + 2 * (9 + 2)
    assert_whole_groups(batch, 2)
    assert [len(set(part)) for part in zip(*ranks(batch), strict=True)] == [2] * 4


def test_without_the_flag_verls_own_balance_runs(trainer: Stock) -> None:
    trainer.config.actor_rollout_ref.actor.use_prefix_grouper = False
    batch, metrics = make_batch("aabb", [40, 2, 40, 2]), {}
    trainer._balance_batch(batch, metrics)
    assert [rank.count("a") for rank in ranks(batch)] == [1, 1], "by length, which cuts groups"
    assert not any(name.startswith("prefix_grouper") for name in metrics)


@pytest.mark.parametrize(
    ("method", "new", "cause"),
    [
        ("_balance_batch", lambda self, other: None, r"takes \(self, other\), without batch"),
        ("_update_actor", lambda self, other: None, r"takes \(self, other\), without batch"),
        ("_update_actor", type, "has no readable signature"),
    ],
)
def test_a_method_with_other_parameters_is_not_patched(monkeypatch, method: str, new: Any, cause: str) -> None:
    monkeypatch.setattr(RayPPOTrainer, "_balance_batch", inspect.unwrap(RayPPOTrainer._balance_batch))
    monkeypatch.setattr(RayPPOTrainer, method, new)
    with pytest.raises(upstream.UpstreamChangedError, match=rf"RayPPOTrainer\.{method} {cause}"):
        keep_groups(RayPPOTrainer)
    assert not hasattr(RayPPOTrainer._balance_batch, "wrapped_by_verl_pg_plugin"), "neither method is patched"


def test_each_update_logs_its_dedup_ratio_and_the_last_one_the_mean(trainer, caplog, monkeypatch) -> None:
    counts = {"total": [800.0], "computed": [200.0], "padding": [0.0]}
    counted = {f"actor/prefix_grouper/{name}_tokens": count for name, count in counts.items()}

    def update(self: Any, batch: Any) -> DataProto:
        return DataProto(meta_info={"metrics": counted})

    monkeypatch.setattr(RayPPOTrainer, "_update_actor", update)
    verl_pg_plugin._patch_trainers()
    verl_pg_plugin._patch_trainers()
    trainer._balance_batch(make_batch("aabbcc", [5] * 6), {})
    trainer.total_training_steps = 2
    for trainer.global_steps in (1, 2):
        trainer._update_actor(None)
        counted["actor/prefix_grouper/computed_tokens"] = [600.0]
    counted_tokens = "(tokens of all sequences over computed tokens, updates of the actor)"
    assert caplog.messages == [
        f"step 1/2: dedup ratio 4.00 {counted_tokens}",
        f"step 2/2: dedup ratio 1.33 {counted_tokens}",
        f"shared prefixes, mean over the run: dedup ratio 2.00 {counted_tokens}",
    ]
    del counted["actor/prefix_grouper/computed_tokens"]  # an update without shared prefixes
    trainer._update_actor(None)
    assert len(caplog.messages) == 3


def test_a_custom_balance_runs_and_its_batch_gets_whole_groups(config: DictConfig) -> None:
    trainer, metrics = keep_groups(OwnBalanceV0)(config), {}
    balanced = trainer._balance_batch(make_batch("abababab", [3, 30, 40, 4, 20, 5, 6, 10]), metrics)
    assert {"own/balanced", "global_seqlen/balanced_max"} <= metrics.keys()
    assert metrics["prefix_grouper/balance/cut_groups"] == 2, "two groups of four rows in mini-batches of two a rank"
    assert sorted(balanced.batch["row"].tolist()) == list(range(8))
    assert_whole_groups(balanced, 2)


def test_a_custom_training_loop_gets_whole_groups(config: DictConfig) -> None:
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 6
    trainer, batch = keep_groups(OwnFitV0)(config), make_batch("abcdabcd" * 3, [7] * 24)
    metrics = trainer.fit(batch)
    assert trainer.actor_rollout_wg.updated == [batch]
    assert metrics["prefix_grouper/balance/cut_groups"] == 0
    assert_whole_groups(batch, 6)


def test_a_loop_that_never_balances_logs_one_warning(config: DictConfig, caplog) -> None:
    trainers, batch = [keep_groups(OwnFitV0)(config) for _ in range(2)], make_batch("aabb", [7] * 4)
    for balance, trainer in zip((True, False), trainers, strict=True):
        for _ in range(2):
            trainer.fit(batch, balance)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "OwnFitV0 updates its actor with a batch that never went through _balance_batch" in warning
    assert "trainer.balance_batch=True" in warning


def test_wrapped_and_derived_classes_are_wrapped_once(config: DictConfig) -> None:
    wrapped, update = keep_groups(OwnFitV0), OwnFitV0._update_actor
    assert keep_groups(wrapped) is OwnFitV0
    assert OwnFitV0._update_actor is update
    assert "_update_actor" not in vars(keep_groups(type("Derived", (wrapped,), {})))

    class CallsParent(wrapped):  # type: ignore[misc, valid-type]
        def _update_actor(self, batch: DataProto) -> DataProto:
            return super()._update_actor(batch)

    trainer = keep_groups(CallsParent)(config)
    trainer.fit(make_batch("aabb", [7] * 4))
    assert trainer._pg_tokens.tolist() == [4.0, 4.0], "the update is counted once"


def test_a_class_that_is_no_verl_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"builtins.dict is derived from neither verl.trainer.ppo.v1"):
        keep_groups(dict)
