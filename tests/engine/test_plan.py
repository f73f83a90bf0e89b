"""Ranks wait for each other in every layer: the expensive micro-batches run first."""

import pytest

from tests.support import group
from verl_pg_plugin.engine.plan import plan_mini_batch
from verl_pg_plugin.mixers import PairCost
from verl_pg_plugin.modalities import TEXT
from verl_pg_plugin.planning.activation_level import Levels
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.synthetic import make_batch

BY_TOKENS = ModelFlops(per_token=1.0, per_label=0.0, pairs=())
BY_PAIRS = ModelFlops(per_token=0.0, per_label=0.0, pairs=(PairCost(1.0),))


@pytest.mark.usefixtures("process_group")
def test_the_order_is_that_of_cost_and_not_of_tokens() -> None:
    batch = make_batch([*group(4, [6] * 8, 2), *group(40, [6], 1)], max_token_len_per_gpu=60)
    for flops in (BY_PAIRS, BY_TOKENS):
        plan = plan_mini_batch(
            batch.clone(), TEXT, flops, packed=True, weights=None, forward_only=False, levels=Levels()
        )
        layouts = [planned.layout for planned in plan.micro_batches]
        costs = [flops.forward([layout]) for layout in layouts]
        assert costs == sorted(costs, reverse=True)
        assert (layouts[0].num_tokens > layouts[1].num_tokens) == (flops is BY_TOKENS), "more tokens, fewer pairs here"
