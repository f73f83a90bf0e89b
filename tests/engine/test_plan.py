"""Ranks plan a mini-batch together: as many micro-batches on each, and whatever FSDP does on all ranks or on none."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from tensordict import TensorDict

from tests.engine.threads import on_threads
from tests.support import group
from verl_pg_plugin.engine.plan import Plan, plan_mini_batch
from verl_pg_plugin.engine.ranks import RankError
from verl_pg_plugin.mixers import PairCost
from verl_pg_plugin.modalities import TEXT, Content, Text
from verl_pg_plugin.planning.activation_level import Levels
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.planning.micro_batches import CacheWeights
from verl_pg_plugin.synthetic import Sample, make_batch

LONE = [sample for seed in range(4) for sample in group(6, [5], seed)]
BY_TOKENS = ModelFlops(per_token=1.0, per_label=0.0, pairs=())
BY_PAIRS = ModelFlops(per_token=0.0, per_label=0.0, pairs=(PairCost(1.0),))


def plan_of(batch: TensorDict, **options: Any) -> Plan:
    settings = {"modality": TEXT, "flops": BY_TOKENS, "packed": True, "weights": None, "forward_only": False}
    settings["levels"] = Levels()
    return plan_mini_batch(batch, **{**settings, **options})


def plans_of(batches: list[TensorDict], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """Of each rank its plan, or how its planning ended."""
    return on_threads(len(batches), lambda rank: plan_of(batches[rank], dp_rank=rank, **options), monkeypatch)


@pytest.mark.parametrize("few", [[*group(30, [3, 4, 5], 1), *LONE], LONE[:3]], ids=["more", "exactly as many"])
def test_every_sequence_is_in_one_micro_batch_whatever_the_other_rank_needs(
    few: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [make_batch(few), make_batch(LONE[:3], max_token_len_per_gpu=10)]
    for batch, plan in zip(batches, plans_of(batches, monkeypatch), strict=True):
        assert len(plan.micro_batches) == 3
        assert sorted(i for planned in plan.micro_batches for i in planned.sequences) == list(range(len(batch)))


def test_ranks_with_one_and_nine_sequences_both_say_what_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group(5, [3], 1), [sample for seed in range(9) for sample in group(5, [3], seed)]]
    batches = [make_batch(samples, max_token_len_per_gpu=8) for samples in groups]
    for error in plans_of(batches, monkeypatch):
        assert "this rank has 1 sequences and another needs 9 micro-batches" in str(error)


def test_every_rank_prefills_where_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gathers weights in a prefill: a rank that ran none would leave the others waiting."""
    oversized, others = group(20, [6, 9, 5, 8], 1), [*LONE, *group(7, [3, 6, 4], 9)]
    batches = [make_batch(samples, max_token_len_per_gpu=36) for samples in (oversized, others)]
    first, second = plans_of(batches, monkeypatch, weights=CacheWeights(), micro_batch_cost=4.0)
    prefills = [[planned.prefill is not None for planned in plan.micro_batches] for plan in (first, second)]
    assert prefills[0] == prefills[1]
    assert any(prefills[0])
    assert all(len(group) == 1 for group in second.groups)
    idle = [planned.prefill.num_tokens for planned in second.micro_batches if planned.prefill is not None]
    assert set(idle) == {1}, "a token that nobody reads"


@dataclass(frozen=True)
class Shown(Text):
    """Text with something for a vision encoder."""

    def read(self, data: TensorDict) -> Content:
        return replace(super().read(data), needs_encoder=True)


@dataclass(frozen=True)
class Unreadable(Text):
    def read(self, data: TensorDict) -> Content:
        raise ZeroDivisionError("the fault of one rank")


def plans_by(modalities: list[Text], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    batch = make_batch(LONE)
    return on_threads(
        len(modalities), lambda rank: plan_of(batch.clone(), modality=modalities[rank], dp_rank=rank), monkeypatch
    )


@pytest.mark.parametrize("images", [[], [0], [1], [0, 1]])
def test_the_encoder_runs_on_all_ranks_or_on_none(images: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for plan in plans_by([Shown() if rank in images else TEXT for rank in range(2)], monkeypatch):
        assert plan.runs_encoder == bool(images)


def test_an_error_in_planning_ends_it_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, failed = plans_by([TEXT, Unreadable()], monkeypatch)
    assert isinstance(failed, ZeroDivisionError)
    assert isinstance(fine, RankError)
    assert str(fine) == "rank 1: ZeroDivisionError: the fault of one rank"


@pytest.mark.parametrize(("sp_size", "num_micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_that_share_a_sequence_share_its_budget(
    sp_size: int, num_micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's budget is one of tokens per GPU, and the tokens of a micro-batch lie on all GPUs of the group."""
    batch = make_batch(LONE, max_token_len_per_gpu=10)
    for plan in on_threads(sp_size, lambda rank: plan_of(batch.clone(), sp_size=sp_size), monkeypatch):
        assert len(plan.micro_batches) == num_micro_batches
        assert all(planned.layout.num_tokens <= 10 * sp_size for planned in plan.micro_batches)


def test_the_order_is_that_of_cost_and_not_of_tokens(process_group: None) -> None:
    """Ranks wait for each other in every layer: the expensive micro-batches run first."""
    long_one, many_short = group(40, [6], 1), group(4, [6] * 8, 2)
    batch = make_batch([*many_short, *long_one], max_token_len_per_gpu=60)
    for flops in (BY_PAIRS, BY_TOKENS):
        layouts = [planned.layout for planned in plan_of(batch.clone(), flops=flops).micro_batches]
        costs = [flops.forward([layout]) for layout in layouts]
        assert costs == sorted(costs, reverse=True)
        assert (layouts[0].num_tokens > layouts[1].num_tokens) == (flops is BY_TOKENS), "more tokens, fewer pairs here"
