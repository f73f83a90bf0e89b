"""Packed mode gives the log-probs, entropies and gradients of every sequence computed alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import actor_loss, check_exact, clone, group, make_engine, save_tiny_model
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

PAD = 0
MIXED = [*group(20, [5, 9, 1, 7], 1), *group(3, [5, 3], 2), *group(33, [4], 3)]
TURN = [*range(40, 52)]
ONE_HEAD = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}

CASES: dict[str, list[Sample]] = {
    "uneven_groups_and_prompts_of_different_length": MIXED,
    "tool_tokens_are_attended_though_loss_masked": [
        Sample(range(9), range(30, 42), mask=[1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1]),
        Sample(range(9), [30, 31, 7, 7], mask=[1, 1, 0, 1]),
    ],
    "pad_and_eos_and_token_zero_inside_prompt_and_response": [
        Sample([PAD, PAD, 5, PAD, 6, PAD], [PAD, 3, PAD]),
        Sample([PAD, PAD, 5, PAD, 6, PAD], [PAD, PAD]),
    ],
    "same_prompt_in_rows_that_are_not_neighbours": [MIXED[0], *group(8, [3], 5), MIXED[1], *group(9, [2], 6), MIXED[2]],
    "filler_rows_with_empty_loss_mask": [*MIXED[:3], *[Sample([2] * 127, [2], mask=[0])] * 3],
    "responses_of_one_token": [Sample(range(6), [t]) for t in (1, 2, 3)],
    "identical_responses": [Sample(range(6), range(10, 15))] * 4,
    "one_response_is_the_beginning_of_another": [
        Sample(range(6), range(10, 15)),
        Sample(range(6), range(10, 18)),
        Sample(range(6), range(10, 12)),
    ],
    "group_of_one": group(7, [6], 7),
    "everything_unique": [sample for seed in range(10, 15) for sample in group(6, [4], seed)],
    "single_token_prompts": [Sample([4], range(20, 26)), Sample([4], range(20, 23)), Sample([5], [6])],
    "a_prompt_that_reaches_into_a_sibling_response": [
        Sample(range(6), range(10, 16)),
        Sample([*range(6), 10, 11, 12], [13, 14, 50]),
    ],
    "turns_that_only_continue_one_another": [Sample(range(4 * k + 3), range(4 * k + 3, 4 * k + 5)) for k in range(9)],
    "multi_turn_branches_three_deep": [
        Sample(range(8), [*TURN, 60, 61]),
        Sample(range(8), [*TURN, 60, 62, 63]),
        Sample(range(8), [*TURN, 70]),
        Sample(range(8), [41, 42]),
        Sample([*range(5), 77], [1, 2]),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_every_token_and_gradient_equals_the_sequence_alone(packed: Any, qwen3: str, case: str) -> None:
    check_exact(packed, qwen3, make_batch(CASES[case], calculate_sum_pi_squared=True))


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_sliding_window_shorter_than_the_prompt(model_type: str, tmp_path: Path) -> None:
    window = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
    path = save_tiny_model(tmp_path, model_type, **window)
    check_exact(make_engine(path, packed=True), path, make_batch(MIXED))


@pytest.mark.parametrize(
    "cut",
    [
        {"max_token_len_per_gpu": 36},
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 5},
    ],
    ids=str,
)
def test_cutting_micro_batches_changes_neither_order_nor_gradient_scale(packed: Any, qwen3: str, cut: dict) -> None:
    check_exact(packed, qwen3, make_batch(MIXED, **cut))


def test_more_than_4096_tokens(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, **ONE_HEAD)
    check_exact(make_engine(path, packed=True), path, make_batch(group(4200, [6, 9], 4)))


def assert_siblings_are_alone(engine: Any, **settings: Any) -> None:
    """The log-probs of two responses do not change by a bit where those of their sibling do."""
    samples = group(12, [6, 6, 6], 8)
    changed = [samples[0], Sample(samples[1].prompt, [t ^ 1 for t in samples[1].response]), samples[2]]
    with engine.eval_mode():
        before, after = (
            engine.infer_batch(make_batch(some, **settings))["model_output"]["log_probs"].unbind()
            for some in (samples, changed)
        )
    assert [torch.equal(*rows) for rows in zip(before, after, strict=True)] == [True, False, True]


def test_sibling_responses_never_see_each_other(packed: Any) -> None:
    assert_siblings_are_alone(packed)


def test_positions_that_nobody_reads_hold_zero(packed: Any) -> None:
    """The last token predicts nothing; verl rolls the next sequence's first token onto it."""
    with packed.eval_mode():
        rows = packed.infer_batch(make_batch(MIXED))["model_output"]["log_probs"].unbind()
    for row, sample in zip(rows, MIXED, strict=True):
        assert row.shape == (len(sample.prompt) + len(sample.response),)
        assert not row[: len(sample.prompt) - 1].any()
        assert row[-1] == 0


def test_metrics_count_tokens_that_were_computed(packed: Any, qwen3: str) -> None:
    batch = make_batch(MIXED, max_token_len_per_gpu=45)
    logical = sum(len(s.prompt) + len(s.response) for s in MIXED)
    physical = (19 + 5 + 9 + 1 + 7) + (2 + 5 + 3) + (33 + 4 - 1)
    metrics = metrics_of(packed, batch)
    assert metrics["prefix_grouper/logical_tokens"] == [logical]
    assert metrics["prefix_grouper/physical_tokens"] == [physical]
    assert metrics["prefix_grouper/dedup_ratio"] == [logical / physical]
    assert metrics["prefix_grouper/groups_per_micro_batch"] == [3 / 3]
    assert metrics["prefix_grouper/attention_backend/sdpa"] == [1.0]
    padding = metrics_of(
        make_engine(qwen3, packed=True, engine={"pad_to_length": True, "pad_to_length_bucket": 60}), batch
    )
    (padded,) = padding["prefix_grouper/physical_tokens"]
    assert padded % 60 == 0
    assert padding["prefix_grouper/padding_tokens"] == [padded - physical]
    assert padded > physical


def metrics_of(engine: Any, batch: Any) -> dict[str, list[float]]:
    with engine.train_mode():
        return engine.forward_backward_batch(clone(batch), actor_loss())["metrics"]


def test_turns_that_only_continue_one_another_count_as_shared(packed: Any) -> None:
    metrics = metrics_of(packed, make_batch(CASES["turns_that_only_continue_one_another"]))
    assert metrics["prefix_grouper/rmpad_micro_batches"] == [0.0]
    assert metrics["prefix_grouper/physical_tokens"] == [4 * 8 + 3 + 2 - 1]
