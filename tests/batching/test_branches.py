"""What a cell's branches cost, before, after and while they change places, each prompt paid for once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.layout.tries  # noqa: F401  (loads the hypothesis profile without a deadline)
from verl_pg_plugin.batching.branches import Branch, _Cell, _prompt_costs
from verl_pg_plugin.batching.runs import Run, RunPrices
from verl_pg_plugin.layout.order import PrefixOrder

PROMPTS = {0: 10.0, 1: 20.0, 2: 40.0}
DRAWN = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(list(PROMPTS)), st.integers(1, 2)), max_size=8)


def branches(drawn: list[tuple[int, int, int]], first: int) -> list[Branch]:
    return [
        Branch(float(cost), first + i, group, Run(first + i, first + i + size, 0.0))
        for i, (cost, group, size) in enumerate(drawn)
    ]


def price(members: list[Branch]) -> float:
    return sum(branch.cost for branch in members) + sum(PROMPTS[group] for group in {b.group for b in members})


@given(DRAWN.filter(bool), DRAWN.filter(bool), st.data())
def test_an_exchange_costs_what_was_said_before_it(mine: list, theirs: list, data: st.DataObject) -> None:
    here, there = branches(mine, 0), branches(theirs, 100)
    cell = _Cell(here, PROMPTS)
    assert cell.cost == price(here)
    sizes = {size: cell.costs(size).tolist() for size in (1, 2)}
    assert all(costs == sorted(costs) for costs in sizes.values())
    leaves, enters = data.draw(st.sampled_from(here)), data.draw(st.sampled_from(there))
    said = cell.cost_after(leaves, enters)
    cell.remove(leaves)
    cell.add(enters)
    after = [*(branch for branch in here if branch is not leaves), enters]
    assert said == pytest.approx(cell.cost) == pytest.approx(price(after))
    for size in (1, 2):
        assert cell.costs(size).tolist() == sorted(branch.cost for branch in after if branch.run.size == size)
        assert [branch.cost for branch in cell.by_size.get(size, [])] == cell.costs(size).tolist()


def test_a_prompt_costs_what_all_of_its_sequences_share_and_a_group_of_one_has_none() -> None:
    order = PrefixOrder(np.arange(4), np.array([9, 9, 9, 7]), np.array([0, 6, 5, 0]))
    prices = RunPrices(order, np.zeros(4, dtype=np.int64), lambda start, rows, heads: 1.0 * rows)
    assert _prompt_costs(np.array([3, 3, 3, 8]), prices) == {3: 5.0, 8: 0.0}
