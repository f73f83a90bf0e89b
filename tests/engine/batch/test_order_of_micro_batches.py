"""Ranks wait for each other in every layer: the dear micro-batches run first, and parts of a chain stay together."""

from itertools import pairwise

import pytest

from tests.support import PACKED_MODE, group
from verl_pg_plugin.cost.pairs import num_pairs
from verl_pg_plugin.engine.batch.micro_batch_plan import CarryPolicy, plan_micro_batches
from verl_pg_plugin.layout import Layout
from verl_pg_plugin.planning.micro_batches import CacheWeights
from verl_pg_plugin.synthetic import make_batch


def rows_of(layout: Layout) -> float:
    return layout.num_tokens


def test_the_order_is_that_of_cost_and_not_of_rows() -> None:
    long_one, many_short = group(40, [6], 1), group(4, [6] * 8, 2)
    batch = make_batch([*many_short, *long_one], max_token_len_per_gpu=60)
    for price in (num_pairs, rows_of):
        layouts = plan_micro_batches(batch.clone(), None, 1, PACKED_MODE, price=price).layouts
        costs = [price(layout) for layout in layouts]
        assert costs == sorted(costs, reverse=True)
        assert (layouts[0].num_tokens > layouts[1].num_tokens) == (price is rows_of), "more rows have fewer pairs here"


@pytest.mark.parametrize("forward_only", [True, False])
def test_parts_of_a_chain_run_one_after_the_other_wherever_their_mean_cost_puts_the_chain(forward_only: bool) -> None:
    small, oversized = [*group(28, [1], 1), *group(20, [2], 2)], group(10, [6] * 8, 3)
    batch = make_batch([*oversized, *small], max_token_len_per_gpu=30)
    carry = CarryPolicy(CacheWeights(0.1, 0.1), forward_only, part_cost=1.0)
    places = {}
    for name, sign in (("dear", 1.0), ("cheap", -1.0)):
        plan = plan_micro_batches(
            batch.clone(), None, 1, PACKED_MODE, carry=carry, price=lambda layout, sign=sign: sign * layout.num_tokens
        )
        (chain,) = plan.chains
        order = [plan.indices.index(part.sequences) for part in (chain if forward_only else chain[::-1])]
        assert len(chain) > 1
        assert all(b == a + 1 for a, b in pairwise(order))
        places[name] = order[0]
    assert places["dear"] != places["cheap"]
