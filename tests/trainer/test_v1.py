"""V1 trainers get whole groups on each rank and in each mini-batch, balanced by estimated cost."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import AutoConfig
from verl.trainer.ppo.v1 import PPOTrainer
from verl.trainer.ppo.v1 import trainer_base as verls

import verl_pg_plugin
from tests.own_models import WeightReadForCausalLM, register_own
from tests.support import jagged
from tests.trainer.conftest import Workers
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.rollout.replay_buffer import prompt_replay_buffer
from verl_pg_plugin.skeleton import text_skeleton
from verl_pg_plugin.trainer import groups, keep_groups
from verl_pg_plugin.trainer.groups import actor_flops, mini_batches_of_config

LOST = "prefix_grouper/lost_to_broken_prefixes"


class StockTrainer(PPOTrainer):
    """verl's trainer without what its ``__init__`` builds."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.actor_rollout_wg = Workers()
        self.tokenizer = SimpleNamespace(eos_token_id=0)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return 1  # no filler

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None: ...


def make_batch(keys: list[str], responses: list[int]) -> KVBatchMeta:
    tags = [{"prompt_len": 8, "response_len": n, "seq_len": 8 + n} for n in responses]
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags)


def ranks(batch: KVBatchMeta) -> list[list[str]]:
    return [part.tolist() for part in np.split(np.array(batch.keys), 2)]


@pytest.fixture
def trainer(config: DictConfig) -> Any:
    verl_pg_plugin._patch_trainers()
    return StockTrainer(config)


def test_a_missing_method_is_a_warning_and_a_missing_class_is_none(monkeypatch, caplog) -> None:
    monkeypatch.delattr(PPOTrainer, "_balance_batch")
    verl_pg_plugin._patch_trainers()
    assert "verl.trainer.ppo.v1.trainer_base.PPOTrainer._balance_batch is gone; tested with verl" in caplog.text
    monkeypatch.delattr(verls, "PPOTrainer")
    verl_pg_plugin._patch_trainers()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("first", "second", "equal_cost"),
    [
        (["a_x_0_0", "a_x_1_0"], ["b_x_0_0", "b_x_1_1"], True),
        (["a_0_0", "a_1_0"], ["one_sample_x", "sample1"], False),  # keys of another form are groups of one
        ([f"a_{10**20}_0", f"a_{10**20 + 1}_0"], ["b_0_0", f"b_{10**20}_0"], True),  # beyond int64
    ],
    ids=["uid and suffixes", "other keys", "long numbers"],
)
def test_sequences_of_one_uid_are_on_one_rank(trainer: Any, first: list, second: list, equal_cost: bool) -> None:
    keys = [key for pair in zip(first, second, strict=True) for key in pair]
    batch, metrics = make_batch(keys, responses=[5, 5, 5, 5]), {}
    assert trainer._balance_batch(batch, metrics) is batch
    assert sorted(map(sorted, ranks(batch))) == [first, second]
    assert metrics["prefix_grouper/balance/cut_groups"] == 0
    assert (metrics["prefix_grouper/balance/slowest_over_mean"] == pytest.approx(1)) == equal_cost
    assert metrics["global_seqlen/balanced_max"] == 26


def test_groups_that_arrive_in_parts_are_whole_in_each_batch(trainer: Any) -> None:
    """A sampler may hand over some responses of a prompt, and the others in a later batch."""
    for part in ({"a": (0, 3), "b": (2,), "c": (1,)}, {"a": (1, 2), "b": (0, 1)}):
        keys = [f"{uid}_{session}_0" for uid, sessions in part.items() for session in sessions]
        batch, metrics = make_batch(keys[::2] + keys[1::2], responses=[5, 6, 7, 8]), {}
        trainer._balance_batch(batch, metrics)
        assert sorted(batch.keys) == keys
        assert keys[:2] in map(sorted, ranks(batch))
        assert metrics["prefix_grouper/balance/cut_groups"] == 0


def test_a_batch_of_another_type_keeps_its_order_with_one_warning(config: DictConfig, caplog) -> None:
    @keep_groups
    class OtherTrainer(StockTrainer):
        def _balance_batch(self, batch: list[str], metrics: dict[str, Any], *args: Any) -> list[str]:
            return batch[::-1]

    trainer, metrics = OtherTrainer(config), {}
    for _ in range(2):
        assert trainer._balance_batch(["a_0_0", "b_0_0", "a_1_0"], metrics) == ["a_1_0", "b_0_0", "a_0_0"]
    assert metrics == {}
    groups.updated(trainer, {"actor/prefix_grouper/total_tokens": 44.0, "actor/prefix_grouper/computed_tokens": 30.0})
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("builtins.list is neither a KVBatchMeta nor a DataProto, so its order stays")
    assert "Fix: pip install 'verl<0.10" in warning


def test_estimated_tokens_are_compared_with_computed_ones(trainer: Any, monkeypatch: Any) -> None:
    """Both are means over the two mini-batches."""

    def update(self: Any, batch: Any, metrics: dict[str, float]) -> Any:
        counted = {"total": 44.0, "computed": 30.0, "padding": 4.0}
        metrics.update({f"actor/prefix_grouper/{name}_tokens": number for name, number in counted.items()})
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    verl_pg_plugin._patch_trainers()
    batch, metrics = make_batch([f"{uid}_{i}_0" for uid in "abcd" for i in (0, 1)], responses=[3] * 8), {}
    trainer._balance_batch(batch, metrics)
    trainer._update_actor(batch, metrics=metrics)
    assert metrics["prefix_grouper/balance/estimated_over_computed_tokens"] == (2 * (7 + 2 * 3)) / 26


def test_turns_of_a_session_share_tokens_in_any_order(trainer: Any, monkeypatch) -> None:
    """The first turn is the prompt of the second, which adds the two tokens of its response."""
    monkeypatch.setattr(groups, "_lost_to_broken_prefixes", lambda trainer, batch: 0.0)  # there are no tokens
    batch, metrics = make_batch(["a_0_1", "a_0_0", "b_7_1", "b_7_0"], responses=[2, 3, 2, 3]), {}
    for tag in batch.tags[::2]:
        tag["prompt_len"] = 11
    trainer._balance_batch(batch, metrics)
    assert metrics["prefix_grouper/balance/estimated_tokens"] == 2 * (10 + 2)


@pytest.fixture
def queue(local_ray: None) -> Iterator[None]:
    transfer_queue.init()
    yield
    transfer_queue.close()


def put_turns(turns: dict[str, tuple[list[int], list[int]]]) -> KVBatchMeta:
    """Store prompts and responses as verl's agent loop does."""
    columns = zip(("prompts", "responses"), zip(*turns.values(), strict=True), strict=True)
    fields = {name: jagged(map(torch.tensor, column)) for name, column in columns}
    tags = [{"prompt_len": len(p), "response_len": len(r), "seq_len": len(p + r)} for p, r in turns.values()]
    transfer_queue.kv_batch_put(list(turns), "train", fields=TensorDict(fields, batch_size=len(turns)), tags=tags)
    return KVBatchMeta(partition_id="train", keys=list(turns), tags=tags)


@pytest.mark.slow
def test_tokens_lost_to_broken_prefixes_are_counted_and_the_worst_break_is_logged_once(trainer, queue, caplog) -> None:
    trainer.tokenizer.decode = str
    first, whole = (list(range(20)), list(range(20, 40))), (list(range(40)), [50, 51])
    broken = [*range(20), *range(25, 40)], [50, 51]
    batch = put_turns({"a_0_1": whole, "a_0_0": first, "b_7_1": whole, "b_7_0": first})
    trainer._balance_batch(batch, metrics := {})
    assert metrics[LOST] == 0
    assert "session" not in caplog.text
    for uid in "cd":
        batch = put_turns({f"{uid}_0_0": first, f"{uid}_1_0": first, f"{uid}_1_10": broken})
        filler = {**batch.tags[0], "is_padding": True}  # is not in the queue
        trainer._balance_batch(KVBatchMeta([*batch.keys, "p_0_0"], [*batch.tags, filler], "train"), metrics)
        assert metrics[LOST] == 15 / (39 + 36 - 19)
    (record,) = (record for record in caplog.records if "loses 15 tokens" in record.message)  # once in a run
    assert record.message.startswith("1 of 2 sessions have a turn that does not begin with an earlier turn: ")
    assert "\nsession c_1: dedup ratio " in record.message
    long = [0] * 2**20, [1]  # what follows a million tokens is not read
    trainer._balance_batch(put_turns({"e_0_0": long, "e_0_1": long, "f_0_0": first, "f_0_1": broken}), metrics)
    assert metrics[LOST] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("queue")
def test_a_finished_prompt_is_noticed_within_a_fifth_of_a_second() -> None:
    buffer = prompt_replay_buffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
    )
    delays = []
    for uid in "abc":  # three times: the machine may be busy
        put_turns({f"{uid}_0_0": ([1], [2])})
        status = {"is_prompt": True, "global_steps": 1, "status": "running"}
        transfer_queue.kv_batch_put([uid], "train", tags=[status])

        def finish(uid: str = uid, status: dict[str, Any] = status) -> float:
            time.sleep(0.55)
            transfer_queue.kv_batch_put([uid], "train", tags=[{**status, "status": "finished"}])
            return time.monotonic()

        with ThreadPoolExecutor(1) as pool:
            finished = pool.submit(finish)
            buffer.sample(1, "train", 1)
            noticed = time.monotonic()
        delays.append(noticed - finished.result())
    assert min(delays) < 0.2


def test_the_assignment_does_not_depend_on_the_names_of_uids(trainer: Any) -> None:
    """verl draws new uids in each run."""
    orders = []
    for uids in ("aabbccddeeff", "ffbbddaaccee"):
        batch = make_batch([f"{uid}_{place}_0" for place, uid in enumerate(uids)], responses=[7] * 12)
        trainer._balance_batch(batch, {})
        orders.append([key.split("_")[1] for key in batch.keys])
    assert orders[0] == orders[1]


def test_flops_of_the_actor_follow_its_config_with_overrides(config: DictConfig) -> None:
    hf_config = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)
    assert actor_flops(config) == ModelFlops.of(text_skeleton(hf_config))
    config.actor_rollout_ref.model.override_config = {"intermediate_size": 48}
    hf_config.intermediate_size = 48
    assert actor_flops(config) == ModelFlops.of(text_skeleton(hf_config))


def test_groups_are_balanced_by_tokens_if_flops_cannot_be_counted(trainer: Any, tmp_path, caplog) -> None:
    register_own(WeightReadForCausalLM).save_pretrained(tmp_path)
    trainer.config.actor_rollout_ref.model.path = str(tmp_path)
    for _ in range(2):
        batch, metrics = make_batch(["a_0_0", "b_0_0", "a_1_0", "b_1_0"], responses=[5, 4, 5, 6]), {}
        trainer._balance_batch(batch, metrics)
        assert sorted(map(sorted, ranks(batch))) == [["a_0_0", "a_1_0"], ["b_0_0", "b_1_0"]]
        assert metrics["prefix_grouper/balance/slowest_over_mean"] == 1
    (warning,) = (record.message for record in caplog.records if "FLOPs" in record.message)
    assert warning.startswith("FLOPs of the actor cannot be counted (RuntimeError: Tensor.item()")
    assert warning.endswith("): groups are balanced by tokens")


@pytest.mark.parametrize(("batch_size", "expected"), [(12, 3), (4, 1), (6, 1), (10, 1)])
def test_number_of_mini_batches_of_the_actor(config, batch_size: int, expected: int) -> None:
    assert mini_batches_of_config(SimpleNamespace(config=config), batch_size) == expected
