"""Micro-batches that would hardly share anything run as plain rmpad, within the token budget and on every rank."""

import logging
import math

import numpy as np
import pytest
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import on_ranks
from tests.support import (
    PACKED_MODE,
    Result,
    actor_loss,
    assert_same,
    clone,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.engine.batch.micro_batch_plan import MicroBatchPlan, plan_micro_batches
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

WEAK = [*group(4, [20, 17, 22], 1), *group(3, [30, 12], 2)]  # shares about a tenth
STRONG = [*group(40, [5, 3, 8, 2], 3), *group(35, [6, 4], 4)]  # shares most


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))


def plan(batch: TensorDict, ratio: float = 1.0) -> MicroBatchPlan:
    return plan_micro_batches(batch, None, 1, PACKED_MODE, ratio)


def copies_keys(layout: PackedLayout) -> bool:
    return PackedAttention(layout, select_kernel("sdpa", "cpu"), "cpu").copies is not None


def num_tokens(samples: list[Sample]) -> int:
    return sum(len(sample.prompt) + len(sample.response) for sample in samples)


def test_the_default_lets_everything_share() -> None:
    planned = plan(make_batch(WEAK))
    assert planned.num_rmpad == 0
    assert copies_keys(planned.layouts[0])


def test_below_the_ratio_attention_is_the_ordinary_varlen_call() -> None:
    planned = plan(make_batch(WEAK), ratio=1.5)
    assert planned.num_rmpad == 1
    (layout,) = planned.layouts
    assert not copies_keys(layout)
    assert layout.num_rows == num_tokens(WEAK) - len(WEAK)
    assert layout.num_roots == len(WEAK)


def test_each_micro_batch_decides_for_itself() -> None:
    batch = make_batch([*WEAK, *STRONG], use_dynamic_bsz=False, micro_batch_size_per_gpu=6)
    planned = plan(batch, ratio=1.5)
    shared = {
        tuple(sorted(rows)): copies_keys(layout) for rows, layout in zip(planned.indices, planned.layouts, strict=True)
    }
    assert sorted(row for rows in shared for row in rows) == list(range(11))
    assert set(shared.values()) == {True, False}
    assert planned.num_rmpad == list(shared.values()).count(False)


@pytest.mark.parametrize("ratio", [1.2, 1.5, 3.0, math.inf])
@pytest.mark.parametrize("seed", range(10))
def test_random_batches_keep_the_ratio_the_budget_and_every_sample(ratio: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [
        sample
        for i in range(6)
        for sample in group(
            int(rng.integers(1, 60)), rng.integers(1, 40, size=rng.integers(1, 7)).tolist(), 9 * seed + i
        )
    ]
    order = rng.permutation(len(samples))
    budget = int(rng.integers(100, 300))
    planned = plan(make_batch([samples[k] for k in order], max_token_len_per_gpu=budget), ratio)
    assert sorted(row for rows in planned.indices for row in rows) == list(range(len(samples)))
    assert all(layout.num_rows <= budget for layout in planned.layouts), (
        "plain rmpad needs more rows, not a larger budget"
    )
    for layout in planned.layouts:
        assert layout.num_logical_tokens >= ratio * layout.num_rows or not copies_keys(layout)
    assert [layout.num_rows for layout in planned.layouts] == sorted(
        (layout.num_rows for layout in planned.layouts), reverse=True
    )


@pytest.mark.parametrize("ratio", [1.5, math.inf])
def test_numbers_stay_those_of_the_sequence_alone(qwen3: str, ratio: float) -> None:
    batch = make_batch([*WEAK, *STRONG], max_token_len_per_gpu=120)
    engine = make_engine(qwen3, packed=True, engine={"min_dedup_ratio": ratio})
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


def test_gated_micro_batches_are_counted_and_told_once(qwen3: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(qwen3, packed=True, engine={"min_dedup_ratio": 1.5})
    batch = make_batch(WEAK)
    with caplog.at_level(logging.WARNING), engine.eval_mode():
        for _ in range(2):
            metrics = engine.infer_batch(clone(batch))["metrics"]
    assert metrics["prefix_grouper/rmpad_micro_batches"] == [1.0]
    assert metrics["prefix_grouper/dedup_ratio"] == [num_tokens(WEAK) / (num_tokens(WEAK) - len(WEAK))]
    assert caplog.text.count("1 of 1 micro-batches ran as plain rmpad: prefix_grouper.min_dedup_ratio=1.5") == 1


def gate_on_one_rank(rank: int, path: str) -> tuple[Result, dict[str, list[float]]]:
    """Rank 0 shares; rank 1 does not and needs more micro-batches for it."""
    batch = tu.index_select_tensor_dict(make_batch([*STRONG, *WEAK], max_token_len_per_gpu=100), SPLITS[rank])
    engine = make_engine(path, packed=True, engine={"min_dedup_ratio": 1.5})
    result = run_engine(engine, batch, actor_loss())
    with engine.eval_mode():
        return result, engine.infer_batch(clone(batch))["metrics"]


SPLITS = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


def test_ranks_that_gate_differently_run_equally_many_micro_batches(qwen3: str) -> None:
    ranks = on_ranks(2, gate_on_one_rank, qwen3)
    reference = run_reference(qwen3, make_batch([*STRONG, *WEAK]), actor_loss())
    for mine, (result, metrics) in zip(SPLITS, ranks, strict=True):
        outputs = {name: [values[row] for row in mine] for name, values in reference.outputs.items()}
        assert_same(result, Result({name: outputs[name] for name in result.outputs}, reference.gradients))
        assert metrics["prefix_grouper/rmpad_micro_batches"] == [2.0]
