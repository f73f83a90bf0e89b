"""The hands through which rows go from part to part: nothing unclaimed, nothing of another mini-batch, nothing held."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.support import group
from verl_pg_plugin.attention.cache import CachedTokens
from verl_pg_plugin.engine.batch.layout_field import set_export, set_layout
from verl_pg_plugin.engine.steps.carry import Carrier
from verl_pg_plugin.layout.carried import CarriedLayout, ChainPart, build_carried_layout, idle_export
from verl_pg_plugin.synthetic import make_batch

TOKENS, OFFSETS = np.array([1, 2, 3, 4, 1, 2, 3, 5]), np.array([0, 4, 8])


def owner() -> CarriedLayout:
    """The part that computes the prompt's two rows, which another part reads."""
    options = {"part": ChainPart(num_chain=2, read_next=2), "first_head": 2, "forward_only": False}
    return build_carried_layout(TOKENS, OFFSETS, np.array([3, 3]), **options)


def micro_batch_with(layout: CarriedLayout) -> TensorDict:
    batch = make_batch(group(3, [1, 1], 0))
    set_layout(batch, layout)
    return batch


@pytest.fixture
def carrier() -> Carrier:
    """With two rows on its stack."""
    carrier = Carrier(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)))
    carrier.stack.push(CachedTokens(0, 2, {(0, 0): torch.ones(2)}, {(0, 0): torch.ones(2)}, torch.ones(2, 1)))
    return carrier


def test_rows_that_no_part_has_taken_are_an_error(carrier: Carrier) -> None:
    with pytest.raises(RuntimeError, match="2 carried rows were never claimed"):
        carrier.check_all_claimed()
    carrier.stack.pop(0)
    carrier.check_all_claimed()


def test_an_updates_owner_takes_the_sums_off_the_stack_and_lets_go_of_the_keys(carrier: Carrier) -> None:
    """It computes the keys itself; both at once would need twice the memory that the budget counts."""
    seen: list[Any] = []

    def step(*args: Any) -> Any:
        seen.append(carrier.carrying(layout))
        return torch.zeros(()), {}

    layout = owner()
    carrier.forward_step(step, step, micro_batch_with(layout), None, False)
    (carrying,) = seen
    (block,) = carrying.owed
    assert not block.key_values
    assert block.key_value_sums.keys() == {(0, 0)}
    assert carrying.read == []
    carrier.check_all_claimed()


def test_a_part_that_is_not_the_forward_in_hand_finds_no_keys(carrier: Carrier) -> None:
    def step(*args: Any) -> Any:
        with pytest.raises(RuntimeError, match="outside its mini-batch: the rows it carries are gone"):
            carrier.carrying(owner())
        return torch.zeros(()), {}

    carrier.forward_step(step, step, micro_batch_with(owner()), None, False)
    with pytest.raises(RuntimeError, match="outside its mini-batch"):
        carrier.carrying(owner())


def test_an_export_runs_in_evaluation_and_leaves_each_module_as_it_was() -> None:
    """verl's activation offload counts forwards in training mode; a frozen part may be in evaluation for good."""
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    module[1].eval()
    seen = []

    def step(*args: Any) -> Any:
        seen.append(([part.training for part in module.modules()], torch.is_grad_enabled()))
        return torch.zeros(()), {}

    layout = owner()
    batch = micro_batch_with(layout)
    set_export(batch, idle_export(TOKENS, OFFSETS))
    carrier = Carrier(module)
    carrier.stack.push(CachedTokens(0, 2))
    carrier.forward_step(step, step, batch, None, False)
    assert seen == [([False] * 3, False), ([True, True, False], True)]
