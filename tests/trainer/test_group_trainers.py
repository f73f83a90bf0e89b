"""The group-keeping trainers are verl's own trainers under another name."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, Qwen3Config
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, get_trainer_cls

from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.trainer import registered_mode
from verl_pg_plugin.trainer.group_trainers import GroupBalanceMixin

VERLS = {
    "sync": PPOTrainerSync,
    "colocate_async": PPOTrainerColocateAsync,
    "separate_async": PPOTrainerSeparateAsync,
}


@pytest.mark.parametrize("mode", VERLS)
def test_each_v1_mode_has_a_trainer_that_only_changes_the_balance(mode: str) -> None:
    trainer_cls = get_trainer_cls(registered_mode(mode))
    assert issubclass(trainer_cls, VERLS[mode])
    changed = {
        name
        for cls in trainer_cls.__mro__[: trainer_cls.__mro__.index(VERLS[mode])]
        for name in vars(cls)
        if callable(getattr(cls, name, None)) and not name.startswith("__")
    }
    why = "the second prices the actor for the first, the third shows steps on the console and trains as verl does"
    assert changed == {"_balance_batch", "_init_tokenizer", "fit"}, why
    assert get_trainer_cls(mode) is VERLS[mode], "verl's own entry stays as it is"


def test_the_registered_name_is_accepted_too() -> None:
    assert registered_mode("pg_sync") == registered_mode("sync") == "pg_sync"


def test_an_unknown_mode_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"trainer_mode='fast'; choose one of sync, colocate_async, separate_async"):
        registered_mode("fast")


class StockTrainer:
    """Stands in for verl's trainer: pads nothing, and leaves the batch as dispatch did."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    def _init_tokenizer(self) -> None:
        pass

    def _balance_batch(self, batch: "Batch", *_: object) -> "Batch":
        return batch


class Trainer(GroupBalanceMixin, StockTrainer):
    actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})


class Batch:
    """The parts of a ``KVBatchMeta`` that a balance reads, and what it was reordered to."""

    def __init__(self, keys: list[str], responses: list[int]) -> None:
        self.keys, self.order = keys, list(range(len(keys)))
        self.tags = [{"prompt_len": 8, "response_len": n, "seq_len": 8 + n} for n in responses]

    def reorder(self, order: list[int]) -> None:
        self.order = order

    def ranks(self) -> list[list[str]]:
        return [[self.keys[i] for i in part] for part in np.split(np.array(self.order), 2)]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """With the config of a checkpoint that has no weights: the driver needs none."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    Qwen3Config(vocab_size=64, **sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    model = {"_target_": "verl.workers.config.HFModelConfig", "path": str(tmp_path), "tokenizer_path": "/nowhere"}
    config = {
        "trainer": {"v1": {"trainer_mode": "pg_sync"}},
        "actor_rollout_ref": {"model": model, "actor": {"ppo_mini_batch_size": 2}, "rollout": {"n": 2}},
    }
    trainer = Trainer(OmegaConf.create(config))
    trainer._init_tokenizer()
    return trainer


def test_the_actor_is_priced_from_the_config_that_its_path_names_with_overrides(trainer: Trainer) -> None:
    config = AutoConfig.from_pretrained(trainer.config.actor_rollout_ref.model.path)
    assert trainer.model_flops == ModelFlops.of_config(config)
    trainer.config.actor_rollout_ref.model.override_config = {"intermediate_size": 48}
    trainer._init_tokenizer()
    config.intermediate_size = 48
    assert trainer.model_flops == ModelFlops.of_config(config)


def test_sequences_with_one_uid_go_to_one_rank_whatever_follows_it_in_their_keys(trainer: Trainer) -> None:
    keys = ["a_x_0_0", "b_x_0_0", "a_x_1_0", "b_x_1_1"]
    batch, metrics = Batch(keys, responses=[5, 5, 5, 5]), {}
    trainer._balance_batch(batch, metrics)
    assert sorted(map(sorted, batch.ranks())) == [["a_x_0_0", "a_x_1_0"], ["b_x_0_0", "b_x_1_1"]]
    assert metrics["prefix_grouper/balance/cut_groups"] == 0
    assert metrics["prefix_grouper/balance/slowest_over_mean"] == pytest.approx(1)


def test_every_mini_batch_of_a_rank_holds_whole_groups_and_waits_for_nobody(trainer: Trainer) -> None:
    """Eight sequences, four a mini-batch: two long groups in one would make it twice as slow as the other."""
    keys, long, short = [f"{uid}_{session}_0" for uid in "abcd" for session in (0, 1)], [40, 40], [2, 2]
    batch, metrics = Batch(keys, responses=[*long, *long, *short, *short]), {}
    trainer._balance_batch(batch, metrics)
    assert metrics["prefix_grouper/balance/cut_groups"] == 0
    for rank in batch.ranks():
        mini_batches = [{key[0] for key in part} for part in np.split(np.array(rank), 2)]
        assert all(len(uids) == 1 for uids in mini_batches)


def test_a_batch_that_only_fits_the_critics_mini_batches_is_balanced_as_one(trainer: Trainer) -> None:
    keys = [f"{uid}_{session}_0" for uid in "abc" for session in (0, 1)]
    batch, metrics = Batch(keys, responses=[3] * 6), {}
    trainer._balance_batch(batch, metrics)
    assert sorted(batch.order) == list(range(6))
    assert metrics["prefix_grouper/balance/cut_groups"] == 1
