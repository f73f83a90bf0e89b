"""Which layers fit a budget, and what a layer holds for the FLOPs that it saves."""

import pytest
import torch
import transformers

from verl_pg_plugin.cost.kept_layers import KeptBudget, LayerActivations, last_of_each, last_that_fit

QWEN3_4B = transformers.Qwen3Config(
    hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=9728
)


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(0, set()), (0.9, set()), (1, {3}), (2.9, {3}), (3, {2, 3}), (6, {1, 2, 3}), (100, {0, 1, 2, 3})],
)
def test_the_last_layers_are_kept_as_long_as_the_budget_lasts(budget: float, kept: set[int]) -> None:
    assert last_that_fit([4, 3, 2, 1], budget) == kept


def test_a_layer_too_large_ends_the_row_and_no_smaller_one_in_front_is_kept() -> None:
    assert last_that_fit([1, 5, 1], 3) == {2}


def test_the_last_layer_of_each_kind_that_is_not_known() -> None:
    kinds = ["recurrent", "recurrent", "attention", "recurrent", "attention"]
    assert last_of_each(kinds, lambda kind: False) == {3, 4}
    assert last_of_each(kinds, {"attention"}.__contains__) == {3}
    assert last_of_each(kinds, set(kinds).__contains__) == frozenset()


def test_a_row_of_a_layer_of_qwen3_4b() -> None:
    """By hand, in bf16: hidden 2560, queries 4096, keys and values 1024 each, MLP 9728, 42 norms in float32."""
    layer = LayerActivations.of(QWEN3_4B, torch.bfloat16)
    assert layer.bytes == 2 * (2560 + 2 * 4096 + 2 * 1024 + 1024 + 2 * 2560 + 3 * 9728) + 4 * 42
    assert layer.flops == 2 * 2560 * (4096 + 1024 + 1024 + 4096 + 2 * 9728)


def test_a_micro_batch_keeps_as_many_whole_layers_as_its_rows_leave_room_for() -> None:
    layer = LayerActivations.of(QWEN3_4B, torch.bfloat16)
    budget = KeptBudget(layer, 36, gib=3 * 1000 * layer.bytes / 2**30)
    assert [budget.layers(rows) for rows in (10, 500, 1000, 1001, 3001)] == [36, 6, 3, 2, 0]
    assert budget.held(1001) == 2 * 1001 * layer.bytes
    assert KeptBudget(layer, 36, gib=float("inf")).layers(10**9) == 36


def test_attention_saves_more_for_a_byte_than_any_matrix() -> None:
    """Which is why it is kept first: at 8192 keys more than five times what its layer saves."""
    layer = LayerActivations.of(QWEN3_4B, torch.bfloat16)
    of_attention = 4 * 4096 * 8192 / (4096 * 2 + 32 * 4)
    assert of_attention > 5 * layer.flops / layer.bytes
