"""Ranks plan a mini-batch together: as many micro-batches on each, and whatever FSDP does on all ranks or on none."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDict
from verl_pg_plugin.engine.batch.layout_field import export_of, runs_tower
from verl_pg_plugin.engine.batch.micro_batch_plan import CarryPolicy, MicroBatchPlan, plan_micro_batches
from verl_pg_plugin.engine.batch.sequences import Sequences
from verl_pg_plugin.engine.sharing_modes import PackedMode

from tests.engine.threads import EVERYONE, on_threads
from tests.support import PACKED_MODE, group
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.engine.ranks import RankError
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.planning.micro_batches import CacheWeights
from verl_pg_plugin.synthetic import make_batch

KERNEL = select_kernel("sdpa", "cpu")
LONE = [sample for seed in range(4) for sample in group(6, [5], seed)]


def random_ranks(seed: int) -> tuple[list[TensorDict], float]:
    """Batches of two ranks, and a gate that some of their groups do not pass."""
    rng = np.random.default_rng(seed)
    budget, ratio = int(rng.integers(60, 140)), float(rng.choice([1.2, 1.5, 2.0]))
    batches = []
    for rank in range(2):
        sizes = [
            (int(rng.integers(1, 40)), rng.integers(1, 20, size=int(rng.integers(1, 6))).tolist(), 100 * seed + i)
            for i in range(10 * rank, 10 * rank + int(rng.integers(2, 6)))
        ]
        samples = [sample for size in sizes for sample in group(*size)]
        batches.append(make_batch(samples, max_token_len_per_gpu=budget))
    return batches, ratio


def plans_of(batches: list[TensorDict], monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> list[Any]:
    """Of each rank its plan, or how its planning ended."""
    return on_threads(
        len(batches),
        lambda rank: plan_micro_batches(batches[rank], EVERYONE, 1, PACKED_MODE, *args, **kwargs),
        monkeypatch,
    )


@pytest.mark.parametrize("seed", [21, 27, 98])
def test_ranks_agree_until_all_have_as_many_micro_batches(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for as many as the other rank has, a rank with a gate may need more still: once is not enough here."""
    batches, ratio = random_ranks(seed)
    first, second = plans_of(batches, monkeypatch, ratio)
    assert len(first.micro_batches) == len(second.micro_batches) > 1
    for batch, plan in zip(batches, (first, second), strict=True):
        assert sorted(row for rows in plan.indices for row in rows) == list(range(len(batch)))


def test_a_rank_with_exactly_as_many_sequences_as_another_needs_micro_batches_fills_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = make_batch(LONE[:2], max_token_len_per_gpu=20), make_batch(LONE[:2], max_token_len_per_gpu=10)
    assert [len(plan.micro_batches) for plan in plans_of([few, many], monkeypatch)] == [2, 2]


def test_gated_micro_batches_count_among_those_that_ranks_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [*group(30, [3, 4, 5], 1), *LONE]
    needs_three = make_batch(LONE[:3], max_token_len_per_gpu=10)
    for plan in plans_of([make_batch(shared), needs_three], monkeypatch, 1.5):
        assert len(plan.micro_batches) == 3


def carrying_plans(monkeypatch: pytest.MonkeyPatch) -> list[MicroBatchPlan]:
    """Of an update with a group above the budget on the first rank alone."""
    chain, others = group(20, [6, 9, 5, 8], 1), [*LONE, *group(7, [3, 6, 4], 9)]
    batches = [make_batch(samples, max_token_len_per_gpu=36) for samples in (chain, others)]
    carry = CarryPolicy(CacheWeights(), forward_only=False, part_cost=0.0)
    return plans_of(batches, monkeypatch, carry=carry)


def test_every_rank_exports_where_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gathers weights in an export: a rank that ran none would leave the others waiting."""
    first, second = carrying_plans(monkeypatch)
    exports = [[export_of(micro_batch) is not None for micro_batch in plan.micro_batches] for plan in (first, second)]
    assert exports[0] == exports[1]
    assert any(exports[0])
    assert (first.exported_rows > 0, second.exported_rows, second.chains) == (True, 0, [])
    for micro_batch, exporting in zip(second.micro_batches, exports[1], strict=True):
        assert not exporting or export_of(micro_batch).num_tokens == 1, "a row that nobody reads"


def test_parts_of_a_chain_come_with_their_own_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = carrying_plans(monkeypatch)
    (chain,) = plan.chains
    layouts = plan.layouts[: len(chain)]
    assert [layout.num_cached for layout in layouts] == [part.num_cached for part in reversed(chain)]
    assert plan.indices[: len(chain)] == [part.sequences for part in reversed(chain)]
    assert layouts[-1].num_cached == 0, "the owner of the prompt runs last and takes what it is owed"


@dataclass(frozen=True, kw_only=True)
class WithPicture(PackedMode):
    """Sequences with something for the model's tower."""

    def read(self, data: TensorDict) -> Sequences:
        sequences = super().read(data)
        return replace(sequences, content=replace(sequences.content, needs_tower=True))


@dataclass(frozen=True, kw_only=True)
class Unable(PackedMode):
    """Cannot lay anything out."""

    def lay_out(self, sequences: Sequences) -> PackedLayout:
        raise ZeroDivisionError("the fault of one rank")


def plans_in(modes: list[PackedMode], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    batch = make_batch(LONE)
    return on_threads(len(modes), lambda rank: plan_micro_batches(batch, EVERYONE, 1, modes[rank]), monkeypatch)


@pytest.mark.parametrize("pictures", [[], [0], [1], [0, 1]])
def test_the_tower_runs_on_all_ranks_or_on_none(pictures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [WithPicture(kernel=KERNEL) if rank in pictures else PACKED_MODE for rank in range(2)]
    for plan in plans_in(modes, monkeypatch):
        assert [runs_tower(micro_batch) for micro_batch in plan.micro_batches] == [bool(pictures)]


def test_an_error_in_laying_out_ends_planning_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, failed = plans_in([PACKED_MODE, Unable(kernel=KERNEL)], monkeypatch)
    assert isinstance(failed, ZeroDivisionError)
    assert isinstance(fine, RankError)
    assert str(fine) == "rank 1: ZeroDivisionError: the fault of one rank"


@pytest.mark.parametrize(("sp_size", "num_micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_that_share_a_sequence_share_its_budget(sp_size: int, num_micro_batches: int) -> None:
    """verl's budget is one of tokens per GPU, and the rows of a micro-batch lie on all GPUs of the group."""
    plan = plan_micro_batches(make_batch(LONE, max_token_len_per_gpu=10), None, sp_size, PACKED_MODE)
    assert len(plan.micro_batches) == num_micro_batches
    assert all(layout.num_tokens <= 10 * sp_size for layout in plan.layouts)


def test_ranks_that_share_a_sequence_run_no_more_of_them_at_a_time() -> None:
    batch = make_batch(LONE, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    assert len(plan_micro_batches(batch, None, 2, PACKED_MODE).micro_batches) == 2
