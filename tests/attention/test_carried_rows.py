"""What parts of a chain owe each other is summed in float32, and added to nobody else's tensors."""

import numpy as np
import pytest
import torch

from verl_pg_plugin.attention.carried_rows import CarriedRows, Carrying
from verl_pg_plugin.attention.carry_stack import CarryBlock
from verl_pg_plugin.attention.kernels.selection import select_kernel
from verl_pg_plugin.attention.shared_rows import AttentionOptions
from verl_pg_plugin.layout import Chunk, PackedLayout, build_chunk_layout

OPTIONS = AttentionOptions(1.0)


def part(num_responses: int, first_label: int = 2, **chain: int) -> PackedLayout:
    """Responses of one token to the prompt 1 2 3; by default a last part that carries the prompt's first two rows."""
    tokens = np.array([token for i in range(num_responses) for token in (1, 2, 3, 10 + i)])
    place = Chunk(**{"num_sequences": num_responses, "num_cached": 2, **chain})
    rows = tokens, np.arange(0, len(tokens) + 1, 4), np.full(num_responses, 3)
    return build_chunk_layout(*rows, chunk=place, first_label=first_label, forward_only=True)


def carried_rows(carrying: Carrying) -> CarriedRows:
    return CarriedRows.carry(carrying, select_kernel("sdpa", "cpu"), "cpu")


def block(stop: int, dtype: torch.dtype) -> CarryBlock:
    keys = {(0, which): torch.zeros(stop, 1, 1, dtype=dtype) for which in (0, 1)}
    sums = {place: torch.zeros(stop, 1, 1) for place in keys}
    return CarryBlock(0, stop, keys, sums, torch.zeros(stop, 1), torch.zeros(stop, 1))


def test_what_a_part_owes_to_carried_keys_is_summed_in_float32() -> None:
    """256 + 1 is 256 in bf16."""
    stack = block(2, torch.bfloat16)
    rows = carried_rows(Carrying(part(3), read=[stack]))
    own = torch.zeros(rows.num_rows, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    keys, *_ = rows.read(own, own, OPTIONS)
    places = np.flatnonzero(rows.carrying.layout.kv_index == 0).tolist()
    grad = torch.zeros_like(keys)
    grad[places] = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)[:, None, None]
    for total in (258.0, 516.0):  # parts that ran before are not forgotten
        keys.backward(grad, retain_graph=True)
        assert stack.key_value_sums[0, 0].flatten().tolist() == [total, 0.0]
    assert stack.key_value_sums[0, 1].flatten().tolist() == [0.0, 0.0]


def test_the_owner_adds_what_it_is_owed_and_rounds_once() -> None:
    """256 + 1 is 256 in bf16, and so is 256 + 1 + 1 where each sum is rounded."""
    owed = block(2, torch.bfloat16)
    for sums in owed.key_value_sums.values():
        sums.fill_(1.0)
    rows = carried_rows(Carrying(part(2, num_cached=0, num_read_next=2), read=[], owed=[owed]))
    own = torch.zeros(rows.num_rows, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    keys, *_ = rows.read(own, own, OPTIONS)
    grad = torch.zeros_like(keys)
    places = np.flatnonzero(rows.carrying.layout.kv_index == 0).tolist()[:2]
    grad[places] = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)[:, None, None]
    keys.backward(grad)
    assert own.grad is not None
    assert own.grad.flatten().tolist() == [258.0, 1.0, 0.0, 0.0]


def test_sums_of_an_export_are_kept_in_float32() -> None:
    leave = CarryBlock(0, 2)
    rows = carried_rows(Carrying(part(2, num_cached=0, num_read_next=2), read=[], leave=leave, is_export=True))
    own = torch.ones(rows.num_rows, 1, 1, dtype=torch.bfloat16)
    rows.read(own, own, OPTIONS)
    assert {sums.dtype for sums in leave.key_value_sums.values()} == {torch.float32}
    assert {keys.dtype for keys in leave.key_values.values()} == {torch.bfloat16}


def test_two_layers_of_one_number_are_an_error_and_not_one_overwritten() -> None:
    rows = carried_rows(Carrying(part(2, num_cached=0, num_read_next=2), read=[], leave=CarryBlock(0, 2)))
    own = torch.ones(rows.num_rows, 1, 1)
    rows.read(own, own, OPTIONS)
    with pytest.raises(
        RuntimeError, match=r"two attention layers call themselves layer_idx 0: set \+\+prefix_grouper\.carry"
    ):
        rows.read(own, own, OPTIONS)


def test_the_gradient_of_head_outputs_that_autograd_holds_is_left_as_it_is() -> None:
    layout = part(2, num_cached=0, num_read_next=3, first_label=0)
    owed = block(3, torch.float32)
    assert owed.column_sums is not None
    owed.column_sums.fill_(5.0)
    own = torch.zeros(len(layout.head_index), 1, requires_grad=True)
    joined = Carrying(layout, read=[], owed=[owed]).join_columns(own)
    grad = torch.ones_like(joined)
    joined.backward(grad)
    assert own.grad is not None
    assert own.grad.sum() == len(own) + 3 * 5.0
    assert (grad == 1).all()


def test_parts_add_to_the_gradients_of_carried_head_outputs() -> None:
    stack = block(2, torch.float32)
    layout = part(2, first_label=0, num_cached=2)
    layout = PackedLayout(**{**vars(layout), "cached_heads": np.array([0, 1])})
    own = torch.zeros(len(layout.head_index), 1, requires_grad=True)
    joined = Carrying(layout, read=[stack]).join_columns(own)
    for total in (1.0, 2.0):
        joined.backward(torch.ones_like(joined), retain_graph=True)
        assert stack.column_sums is not None
        assert stack.column_sums.flatten().tolist() == [total, total]
