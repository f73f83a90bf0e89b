"""What a mini-batch reports about itself is what its rows cost."""

from dataclasses import replace

import numpy as np
import pytest
from verl_pg_plugin.engine.batch.micro_batch_plan import MicroBatchPlan
from verl_pg_plugin.engine.batch.sequences import Sequences

from verl_pg_plugin.engine.batch import plan_metrics as module
from verl_pg_plugin.layout import build_packed_layout
from verl_pg_plugin.mixers.protocol import PairCost
from verl_pg_plugin.modalities import Content
from verl_pg_plugin.planning.cost import ModelFlops

FLOPS = ModelFlops(per_token=100.0, per_label=10.0, pairs=(PairCost(1.0),))
LAYOUT = build_packed_layout(np.array([1, 2, 3, 4, 1, 2, 3, 5]), np.array([0, 4, 8]), np.array([3, 3]))
# Twice two responses of one token to a prompt of three; two of the prompts begin alike.
TOKENS = np.array([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 4, 1, 2, 6, 5])
SEQUENCES = Sequences(
    content=Content(tokens=TOKENS, keys=TOKENS, offsets=np.array([0, 4, 8, 12, 16])),
    prompt_lengths=np.array([3, 3, 3, 3]),
    classes=None,
)


def plan_of(indices: list[list[int]]) -> MicroBatchPlan:
    nothing = {"chains": [], "exported_rows": 0, "parts_with": lambda copies: []}
    return MicroBatchPlan([], indices, sequences=SEQUENCES, **nothing)


def metrics(forward_only: bool, monkeypatch: pytest.MonkeyPatch, num_padding_rows: int = 0) -> dict[str, list[float]]:
    return module.plan_metrics(ranks_of_a_group(forward_only, monkeypatch, num_padding_rows), sp_size=2)


def ranks_of_a_group(
    forward_only: bool, monkeypatch: pytest.MonkeyPatch, num_padding_rows: int = 0
) -> list[dict[str, float]]:
    """Figures of two ranks that share their sequences."""
    plan = plan_of([[0, 1], [2, 3]])
    monkeypatch.setattr(MicroBatchPlan, "layouts", [LAYOUT, LAYOUT])
    figures = module.figures_of_rank(plan, num_padding_rows, 0, FLOPS, forward_only=forward_only)
    return [figures, figures]


def test_an_update_counts_its_forward_three_times_and_log_probs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = 2 * (4 * 100 + 2 * 10 + (1 + 2 + 3 + 3))
    of_devices = [module.flops_of_a_device(ranks_of_a_group(only, monkeypatch), sp_size=2) for only in (True, False)]
    assert of_devices == [pytest.approx(forward / 2), pytest.approx(3 * forward / 2)]


def test_padding_is_physical_and_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, padded = (ranks_of_a_group(True, monkeypatch, num_padding_rows=rows) for rows in (0, 8))
    assert module.flops_of_a_device(plain, 2) == module.flops_of_a_device(padded, 2)
    plain, padded = module.plan_metrics(plain, 2), module.plan_metrics(padded, 2)
    assert plain["prefix_grouper/dedup_ratio"] == [16 / 8]
    assert padded["prefix_grouper/dedup_ratio"] == [16 / 16]
    assert padded["prefix_grouper/padding_tokens"] == [8.0]


def test_copies_are_told_per_computed_row_and_by_the_largest_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = build_packed_layout(np.array([1, 2, 3]), np.array([0, 3]), np.array([1]))
    plan = plan_of([[0, 1], [2, 3], [0]])
    monkeypatch.setattr(MicroBatchPlan, "layouts", [LAYOUT, LAYOUT, alone])
    figures = [
        module.figures_of_rank(plan, 0, 0, FLOPS, forward_only=True, bytes_of_a_copy=size) for size in (2**29, 2**30)
    ]
    told = module.plan_metrics(figures, sp_size=1)
    # a prompt of two rows, copied once for itself and twice for a row of response each
    assert told["prefix_grouper/copied_keys_per_row"] == [2 * (2 + 3 + 3) / (2 * 4 + 2)]
    assert told["prefix_grouper/peak_copied_gib"] == [8.0]


def test_the_gain_is_told_in_flops_and_beside_what_whole_prompts_give(monkeypatch: pytest.MonkeyPatch) -> None:
    told = metrics(True, monkeypatch)
    shared = 2 * (4 * 100 + 2 * 10 + (1 + 2 + 3 + 3))
    alone = 4 * (4 * 100 + 4 * 10 + (1 + 2 + 3 + 4))
    assert told["prefix_grouper/flop_ratio"] == [pytest.approx(alone / shared)]
    assert told["prefix_grouper/dedup_ratio_of_groups"] == [16 / (2 * 2 + 4 * 1)]


@pytest.mark.parametrize(("indices", "groups"), [([[0, 1], [2, 3]], 1), ([[0, 2], [1, 3]], 2), ([[0, 1, 2, 3]], 2)])
def test_groups_are_prompts_and_not_roots_of_tries(indices: list[list[int]], groups: float) -> None:
    """All four begin with token 1: one root, two prompts."""
    plan = plan_of(indices)
    assert plan.num_prompt_groups / len(indices) == groups


def test_prompts_of_another_class_are_another_group() -> None:
    classes = replace(SEQUENCES, classes=np.array([0, 1, 0, 0]))
    assert classes.prompt_groups.tolist() == [0, 1, 2, 2]


def test_a_step_takes_as_much_memory_as_its_fullest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of([[0, 1], [2, 3]])
    monkeypatch.setattr(MicroBatchPlan, "layouts", [LAYOUT, LAYOUT])
    ranks = [
        module.figures_of_rank(plan, 0, carried_bytes, FLOPS, forward_only=True) for carried_bytes in (2**31, 2**30)
    ]
    assert module.plan_metrics(ranks, sp_size=1)["prefix_grouper/peak_carried_gib"] == [2.0]
