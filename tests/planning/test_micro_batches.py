"""Micro-batches of random trees: none is lost, budgets hold with cached tokens, little is computed twice."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.tries import (
    Batch,
    batch_of,
    batches,
    cache_weights,
    cut_at_cost,
    limits_for,
    num_of_group,
    plans,
    tries,
)
from tests.support import num_calls
from verl_pg_plugin.layout import PrefixOrder
from verl_pg_plugin.planning import micro_batches as planner
from verl_pg_plugin.planning.activation_policy import CacheWeights
from verl_pg_plugin.planning.micro_batches import MicroBatch, MicroBatchLimits, build_layouts, cut_micro_batches

Plan = list[list[MicroBatch]]
ANY_BATCH = st.one_of(tries(), batches(max_sequences=10, with_classes=True))
FREE = CacheWeights()
PROMPT = tuple(range(100, 200))
GROUP = batch_of(*[(PROMPT, (i, i, i)) for i in range(8)])


def parts_of(plan: Plan) -> list[MicroBatch]:
    return [part for group in plan for part in group]


def members(plan: Plan) -> list[list[int]]:
    return sorted(sorted(part.sequences) for part in parts_of(plan))


def num_split(plan: Plan) -> int:
    return sum(len(group) > 1 for group in plan)


def prefills(plan: Plan) -> list[int]:
    missing = (part.chunk.num_cached - part.chunk.num_kept for part in parts_of(plan) if part.chunk)
    return [tokens for tokens in missing if tokens]


def recomputed(plan: Plan, order: PrefixOrder) -> int:
    return sum(part.num_tokens for part in parts_of(plan)) - int(order.num_new.sum())


def cost(plan: Plan, order: PrefixOrder, forward_only: bool) -> float:
    """Return what a plan costs beyond computing each token once, in tokens of an update."""
    a_batch = planner.MICRO_BATCH_COST
    of_prefills = 0 if forward_only else planner.PREFILL_COST * sum(tokens + a_batch for tokens in prefills(plan))
    return recomputed(plan, order) + a_batch * len(parts_of(plan)) + of_prefills


@given(st.data(), ANY_BATCH)
def test_sequences_are_computed_once_within_the_limits(data, batch) -> None:
    """A single sequence may exceed the weighted limit."""
    limits, weights = data.draw(limits_for(batch)), data.draw(cache_weights)
    given_weights = data.draw(st.sampled_from([weights, weights, None]))
    plan = data.draw(plans(batch, limits=limits, weights=given_weights))
    assert sorted(s for part in parts_of(plan) for s in part.sequences) == list(range(len(batch.sequences)))
    for part in parts_of(plan):
        chunk, num_chunk = part.chunk, num_of_group(part)
        apart = [part.sequences[:num_chunk], part.sequences[num_chunk:]]
        skipped = chunk.num_cached if chunk else 0
        assert part.num_tokens == sum(len(batch.take(some).rows()) for some in apart) - skipped
        assert part.num_tokens > 0 or not chunk
        assert len(part.sequences) <= (limits.max_sequences or len(part.sequences))
        held = given_weights or CacheWeights()
        taken = (held.alone if len(part.sequences) == 1 else held.computed) * part.num_tokens
        if chunk:
            published = max(chunk.num_read_next - chunk.num_kept, 0)
            taken += weights.cached * chunk.num_cached + weights.published * published
        most = limits.max_tokens or np.inf
        assert part.num_tokens <= most
        is_whole_group = not chunk and len({s[:2] for s in batch.take(part.sequences).sequences}) == 1
        assert taken <= most + 1e-9 or is_whole_group
    for group in plan:
        chunks = [part.chunk for part in group if part.chunk]
        assert len(chunks) == (len(group) if len(group) > 1 and given_weights else 0)
        if chunks:
            assert (chunks[0].num_cached, chunks[-1].num_read_next) == (0, 0)
            assert [a.num_read_next for a in chunks[:-1]] == [b.num_cached for b in chunks[1:]]


@given(st.data(), ANY_BATCH)
def test_a_rank_makes_exactly_as_many_micro_batches_as_required(data: st.DataObject, batch: Batch) -> None:
    fixed = {
        "limits": data.draw(limits_for(batch)),
        "weights": data.draw(st.sampled_from([None, FREE, CacheWeights(0.5, 0.5, 0.5), CacheWeights(1.5, 1.5)])),
        "forward_only": data.draw(st.booleans()),
        "cost": 2.0,
    }
    wanted = data.draw(st.integers(len(parts_of(data.draw(plans(batch, at_least=1, **fixed)))), len(batch.sequences)))
    assert len(parts_of(data.draw(plans(batch, at_least=wanted, **fixed)))) == wanted


@given(st.data(), ANY_BATCH)
def test_groups_that_fit_are_computed_in_one_piece(data: st.DataObject, batch: Batch) -> None:
    limits = data.draw(limits_for(batch))
    plan = parts_of(data.draw(plans(batch, limits=limits, at_least=1)))
    place, groups = {s: i for i, part in enumerate(plan) for s in part.sequences}, defaultdict(list)
    for s, tokens in enumerate(batch.sequences):
        if len(tokens) > 1:  # others compute nothing
            groups[batch.class_of(s), tokens[:2]].append(s)
    for group in groups.values():
        tokens, most = len(batch.take(group).rows()), limits.max_tokens
        if tokens <= (most or tokens) and len(group) <= (limits.max_sequences or len(group)):
            # Without a token budget a split group's limit is that of the longest sequences.
            assert len({place[s] for s in group}) == 1 or most is None


@given(st.data(), batches(with_classes=True, max_sequences=10))
def test_batch_order_does_not_change_the_micro_batches(data: st.DataObject, batch: Batch) -> None:
    limits = data.draw(limits_for(batch))

    def contents(some: Batch) -> list[Counter]:
        plan = cut_micro_batches(some.order(), limits, FREE)
        return [Counter((some.class_of(s), some.sequences[s]) for s in part.sequences) for part in parts_of(plan)]

    assert contents(batch) == contents(batch.take(data.draw(st.permutations(range(len(batch.sequences))))))


LOGNORMAL = np.minimum(np.random.default_rng(0).lognormal(7.3, 0.9, 512), 16_000).astype(int) + 1
WEIGHTS_8B = CacheWeights(0.744, 0.496, 0.496), CacheWeights(0.248, 0.248, 0.0)
WEIGHTS_4B = CacheWeights(0.914, 0.610, 0.381), CacheWeights(0.305, 0.305, 0.0)


@pytest.mark.parametrize(
    ("prompt", "responses", "budget", "weights", "update", "log_probs"),
    [
        (8192, [2048] * 32, 20_480, WEIGHTS_8B, 3885.25, 1400),
        (8192, [2048] * 64, 20_480, WEIGHTS_8B, 5635.25, 2800),
        (16_384, [2048] * 16, 20_480, WEIGHTS_8B, 5933.25, 1050),
        (32_768, [1024] * 16, 40_960, WEIGHTS_4B, 9329.25, 700),
        (2000, LOGNORMAL.tolist(), 20_480, WEIGHTS_8B, 23687.25, 21700),
        (8192, [64] * 256, 20_480, WEIGHTS_4B, 2835.25, 700),
        (30_000, [32] * 64, 40_960, WEIGHTS_4B, 350, 350),
    ],
)
def test_grpo_groups_cost_what_the_cheapest_cuts_cost(prompt, responses, budget, weights, update, log_probs) -> None:
    """Expected costs are from a dynamic programme over all cuts."""
    n = len(responses)
    order = PrefixOrder(np.arange(n), prompt - 1 + np.array(responses), np.array([0, *[prompt - 1] * (n - 1)]))
    for forward_only, expected in ((False, update), (True, log_probs)):
        plan = cut_micro_batches(order, MicroBatchLimits(budget), weights[forward_only], forward_only=forward_only)
        assert cost(plan, order, forward_only) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("group_size", "response"), [(1, 512), (256, 512), (8192, 64)])
def test_cutting_takes_linear_time(group_size: int, response: int) -> None:
    size = 8192
    lengths = 1023 + np.random.default_rng(0).integers(response // 2, response, size)
    order = PrefixOrder(np.arange(size), lengths, np.where(np.arange(size) % group_size, 1023, 0))
    weights = CacheWeights(0.745, 0.497, 0.4)
    plans: list[Plan] = []
    assert num_calls(lambda: plans.append(cut_micro_batches(order, MicroBatchLimits(6000), weights))) < 60 * size
    (plan,) = plans
    assert recomputed(plan, order) == 0
    assert num_split(plan) == (size // group_size if group_size > 1 else 0)


def cut_group(max_tokens=None, weights=FREE, at_least=1, max_sequences=None) -> Plan:
    """Cut 8 sequences of a prompt of 99 tokens and 3 tokens of each response."""
    return cut_at_cost(GROUP.order(), MicroBatchLimits(max_tokens, max_sequences), weights, at_least)


CUTS = {
    "the_limit_counts_shared_prompts_once": ((99 + 8 * 3, None), [8], 0, 0),
    "parts_of_one_size": ((99 + 8 * 3 - 1, None), [4, 4], 99, 0),
    "parts_that_fill_the_limit": ((99 + 3 * 3, None), [2, 3, 3], 198, 0),
    "another_rank_needs_2": ((None, None, 2), [4, 4], 99, 0),
    "another_rank_needs_3": ((None, None, 3), [2, 2, 4], 198, 0),
    "another_rank_needs_3_and_prompts_are_cached": ((None, FREE, 3), [2, 2, 4], 0, 99),
    "a_prompt_that_nearly_fills_the_limit_is_computed_once": ((99 + 3,), [1, 7], 0, 99),
    "no_room_for_pending_gradients": ((103, CacheWeights(0.5, 0.5)), [1] * 8, 693, 0),
    "room_where_attention_is_computed_again": ((103, CacheWeights(0.5, 0.5, 0.5)), [1, 7], 0, 99),
    "no_room_even_so": ((103, CacheWeights(0.5, 0.75, 0.5)), [1] * 8, 693, 0),
    "a_micro_batch_size_in_sequences": ((None, FREE, 1, 2), [2] * 4, 0, 99),
}


@pytest.mark.parametrize(("cut", "sizes", "computed_again", "prefill"), CUTS.values(), ids=CUTS)
def test_cuts_of_a_group_recompute_little(cut: tuple, sizes: list[int], computed_again: int, prefill: int) -> None:
    plan = cut_group(*cut)
    assert sorted(len(part.sequences) for part in parts_of(plan)) == sizes
    assert (recomputed(plan, GROUP.order()), sum(prefills(plan))) == (computed_again, prefill)
    assert num_split(plan) == (prefill > 0)


def test_whole_groups_are_packed_longest_first_and_not_split_by_templates() -> None:
    pairs = [((g, g + 1, g + 2), (i,)) for g in range(10, 90, 10) for i in range(4)]
    plan = cut_micro_batches(batch_of(*pairs).order(), MicroBatchLimits(max_tokens=2 * (2 + 4)))
    assert [len(part.sequences) for part in parts_of(plan)] == [8, 8, 8, 8]
    unique = batch_of(((1,), (1, 1, 1, 1)), ((2,), (2, 2, 2, 2)), ((3,), [3] * 8))
    assert members(cut_micro_batches(unique.order(), MicroBatchLimits(), at_least=2)) == [[0, 1], [2]]
    one_long = PrefixOrder(np.arange(4), np.array([9, 1, 1, 1]), np.zeros(4, dtype=np.int64))
    assert len(cut_micro_batches(one_long, MicroBatchLimits(max_sequences=2))) == 2, "as few as hold them"
    prompts = [(*range(50), 60 + q, *range(30)) for q in range(6)]
    batch = batch_of(*[(prompt, (i, i)) for i in range(4) for prompt in prompts])
    plan = cut_micro_batches(batch.order(), MicroBatchLimits(max_tokens=150))
    assert sorted(sorted({s % 6 for s in part.sequences}) for part in parts_of(plan)) == [[0, 1], [2, 3], [4, 5]]


def test_groups_are_separated_if_another_rank_needs_more() -> None:
    tokens, shared = np.array([7, 6, 52, 18, 31, 27, 45, 43]), np.array([0, 6, 0, 0, 0, 0, 0, 0])
    order, weights = PrefixOrder(np.arange(8), tokens, shared), CacheWeights(0.5, 0.5)
    plans = [members(cut_micro_batches(order, MicroBatchLimits(62, 2), weights, ranks)) for ranks in (1, 6)]
    assert [len(plan) for plan in plans] == [5, 6]
    assert all(sorted(s for part in plan for s in part) == list(range(8)) for plan in plans)
    # One group is cut into as many micro-batches as sequences.
    order = PrefixOrder(np.arange(1024), np.arange(1, 1025), np.arange(1024))
    for weights in (None, FREE):
        assert len(parts_of(cut_micro_batches(order, MicroBatchLimits(), weights, 1024))) == 1024


def test_impossible_limits_and_counts_are_refused() -> None:
    batch = batch_of(((1, 2), (3,)), ((4, 5, 6), (7, 8)))
    for weights in (None, FREE):
        with pytest.raises(ValueError, match=r"sequence 1 alone needs 4 tokens of computation, more than the 3"):
            cut_micro_batches(batch.order(), MicroBatchLimits(max_tokens=3), weights)
    with pytest.raises(ValueError, match="8 sequences cannot fill 9 micro-batches"):
        cut_group(at_least=9)


def test_tiny_prefixes_are_recomputed_rather_than_prefilled() -> None:
    tiny = batch_of(*[(range(9), [i] * 50) for i in range(8)]).order()
    update = cut_micro_batches(tiny, MicroBatchLimits(210), FREE)
    assert (num_split(update), recomputed(update, tiny)) == (0, 8 * (len(update) - 1))
    assert num_split(cut_micro_batches(tiny, MicroBatchLimits(210), FREE, forward_only=True)) == 1


def test_limits_count_a_state_for_each_fork_from_the_cached_path() -> None:
    paths = [(*range(40 - 4 * k), *range(100 * k + 100, 100 * k + 112)) for k in range(9)]
    batch = batch_of(*[(path, (1, 2)) for path in paths])
    weights = CacheWeights(state=8.0)
    most = 0
    for max_tokens in range(70, 110):
        plan = cut_at_cost(batch.order(), MicroBatchLimits(max_tokens), weights)
        layouts = [layout for group in plan for layout in build_layouts(group, batch.as_numbers, forward_only=True)]
        for part, layout in zip(parts_of(plan), layouts, strict=True):
            published = part.chunk and part.chunk.num_read_next > part.chunk.num_kept
            assert part.num_tokens + 8 * (len(layout.resumed_at) + bool(published)) <= max_tokens
            most = max(most, len(layout.resumed_at))
    assert most > 1


def test_small_groups_fill_the_room_left_by_chunks() -> None:
    batch = batch_of(*[((7, i), (1, 2)) for i in range(3)], *[(PROMPT, (i, i, i)) for i in range(8)])
    plan = cut_at_cost(batch.order(), MicroBatchLimits(120), FREE)
    assert [len(group) for group in plan] == [2]
    assert sum(len(part.sequences) - num_of_group(part) for part in plan[0]) == 3


@pytest.mark.parametrize(("preamble", "num_groups", "num_prompts"), [(0, 4, 1), (3, 4, 1), (60, 1, 5)])
def test_long_templates_are_cached_and_short_ones_recomputed(preamble, num_groups, num_prompts) -> None:
    """A cached short template would chain chunks of other prompts, with labels from the shortest prompt on."""
    prompts = [(*range(preamble), *range(1000 * g, 1000 * g + 100)) for g in range(1, 5)]
    pairs = [(prompt, (i,) * 30) for prompt in prompts for i in range(8)]
    plan = cut_at_cost(batch_of(*pairs, ((*range(preamble), 7), (1, 2, 3))).order(), MicroBatchLimits(256), FREE)
    split = [[s for part in group for s in part.sequences[: num_of_group(part)]] for group in plan if len(group) > 1]
    assert [len({s // 8 for s in sequences}) for sequences in split] == [num_prompts] * num_groups
    assert max(part.num_tokens for part in parts_of(plan)) <= 256


@pytest.mark.parametrize(("response", "again"), [(60, 1), (600, 8 * 51 + 7)])
def test_samples_of_short_prompts_stay_together(response: int, again: int) -> None:
    """The template separates groups but keeps samples of a prompt; groups of long samples take two micro-batches."""
    prompts = [(7, 8, *range(100 * g, 100 * g + 50)) for g in range(1, 9)]
    order = batch_of(*[(prompt, (i,) * response) for prompt in prompts for i in range(8)]).order()
    assert recomputed(cut_micro_batches(order, MicroBatchLimits(60 * planner.SHORT_PREFIX)), order) == again
