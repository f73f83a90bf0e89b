"""What a balance is told about a batch, whatever container the trainer keeps it in."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from transformers import AutoConfig

from tests.trainer.conftest import Workers
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.trainer.groups import actor_flops, mini_batches_of_config, regroup


def test_the_actor_is_priced_from_the_config_that_its_path_names_with_overrides(
    make_config: Callable[..., DictConfig],
) -> None:
    config = make_config()
    hf_config = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)
    assert actor_flops(config) == ModelFlops.of_config(hf_config)
    config.actor_rollout_ref.model.override_config = {"intermediate_size": 48}
    hf_config.intermediate_size = 48
    assert actor_flops(config) == ModelFlops.of_config(hf_config)


def test_two_runs_whose_uids_are_drawn_anew_assign_alike(make_config: Callable[..., DictConfig]) -> None:
    """Groups that cost the same would otherwise go where the names of their uids sort: no run would repeat another."""
    trainer = SimpleNamespace(config=make_config(), actor_rollout_wg=Workers())
    trainer._pg_num_mini_batches = lambda trainer, batch_size: 3
    orders = []
    for uids in ("abcdef", "fbdace"):
        keys = [f"{uid}_{place}_0" for place, uid in enumerate(uid for uid in uids for _ in range(2))]
        batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{"prompt_len": 7, "response_len": 7}] * 12)
        regroup(trainer, batch, {}, "")
        orders.append([key.split("_")[1] for key in batch.keys])
    assert orders[0] == orders[1]


@pytest.mark.parametrize(("batch_size", "expected"), [(12, 3), (4, 1), (6, 1), (10, 1)])
def test_mini_batches_are_those_of_the_actor_where_it_trains(
    make_config: Callable[..., DictConfig], batch_size: int, expected: int
) -> None:
    assert mini_batches_of_config(SimpleNamespace(config=make_config()), batch_size) == expected
