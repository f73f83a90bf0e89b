"""Micro-batches over random tries: nobody is lost, nobody exceeds the limit, groups stay whole where they fit."""

import time
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches

from tests.layout.tries import Batch, batch_of, batches
from verl_pg_plugin.layout import PrefixOrder


@st.composite
def limits_for(draw: st.DrawFn, batch: Batch) -> MicroBatchLimits:
    """Limits that every single sequence meets."""
    longest = max(map(len, batch.sequences)) - 1
    max_rows = draw(st.none() | st.integers(longest, 2 * longest) | st.just(len(batch.rows())))
    max_sequences = draw(st.none() | st.integers(1, len(batch.sequences)))
    return MicroBatchLimits(max_rows, max_sequences)


def physical_rows(batch: Batch, micro_batch: list[int]) -> int:
    return len(batch.take(micro_batch).rows())


def admitted(batch: Batch, limits: MicroBatchLimits, micro_batch: list[int]) -> bool:
    return limits.admit(physical_rows(batch, micro_batch), len(micro_batch))


def sharing(batch: Batch, depth: int | None = None) -> list[list[int]]:
    """For every row (of the given position, or any), the sequences that contain it."""
    members = defaultdict(list)
    for s, tokens in enumerate(batch.sequences):
        for t in range(len(tokens) - 1) if depth is None else [depth]:
            members[batch.class_of(s), tokens[: t + 2]].append(s)
    return list(members.values())


@given(st.data(), batches(with_classes=True, max_sequences=12))
def test_every_sequence_is_trained_on_exactly_once(data: st.DataObject, batch: Batch) -> None:
    at_least = data.draw(st.integers(1, len(batch.sequences)))
    cut = cut_micro_batches(batch.order(), data.draw(limits_for(batch)), at_least)
    assert sorted(s for micro_batch in cut for s in micro_batch) == list(range(len(batch.sequences)))


@given(st.data(), batches(with_classes=True, max_sequences=12))
def test_no_micro_batch_is_empty_or_exceeds_what_fits_into_memory(data: st.DataObject, batch: Batch) -> None:
    limits = data.draw(limits_for(batch))
    at_least = data.draw(st.integers(1, len(batch.sequences)))
    for micro_batch in cut_micro_batches(batch.order(), limits, at_least):
        assert micro_batch
        assert admitted(batch, limits, micro_batch)


@given(st.data(), batches(with_classes=True, max_sequences=12))
def test_sequences_that_share_a_row_and_fit_are_computed_in_one_piece(data: st.DataObject, batch: Batch) -> None:
    """Groups whole, and where a system prompt makes one group of everything, the groups inside it."""
    limits = data.draw(limits_for(batch))
    place = {s: i for i, micro_batch in enumerate(cut_micro_batches(batch.order(), limits)) for s in micro_batch}
    for together in sharing(batch):
        if admitted(batch, limits, together):
            assert len({place[s] for s in together}) == 1


@given(st.data(), batches(max_sequences=12))
def test_ranks_that_agree_on_a_number_of_micro_batches_get_at_least_that_many(
    data: st.DataObject, batch: Batch
) -> None:
    limits = data.draw(limits_for(batch))
    alone = len(cut_micro_batches(batch.order(), limits))
    at_least = data.draw(st.integers(1, len(batch.sequences)))
    assert len(cut_micro_batches(batch.order(), limits, at_least)) >= at_least
    assert len(cut_micro_batches(batch.order(), MicroBatchLimits(), at_least)) == at_least
    assert alone >= limits.least_micro_batches(len(batch.rows()), len(batch.sequences))


@given(st.data(), batches(with_classes=True, max_sequences=10))
def test_the_order_of_the_mini_batch_does_not_change_the_micro_batches(data: st.DataObject, batch: Batch) -> None:
    limits = data.draw(limits_for(batch))
    rows = data.draw(st.permutations(range(len(batch.sequences))))

    def contents(some: Batch) -> list[Counter]:
        cut = cut_micro_batches(some.order(), limits)
        return [Counter((some.class_of(s), some.sequences[s]) for s in micro_batch) for micro_batch in cut]

    assert contents(batch) == contents(batch.take(rows))


@given(st.data(), batches(max_sequences=12))
def test_the_largest_micro_batch_runs_first(data: st.DataObject, batch: Batch) -> None:
    """Out of memory shows in the first micro-batch and not in the last."""
    limits = data.draw(limits_for(batch))
    if not all(admitted(batch, limits, group) for group in sharing(batch, depth=0)):
        return
    sizes = [physical_rows(batch, micro_batch) for micro_batch in cut_micro_batches(batch.order(), limits)]
    assert sizes == sorted(sizes, reverse=True)


PROMPT = tuple(range(100, 200))
GROUP = batch_of(*[(PROMPT, (i, i, i)) for i in range(8)])


def test_the_limit_counts_shared_prompts_once() -> None:
    physical = 99 + 8 * 3
    assert len(cut_micro_batches(GROUP.order(), MicroBatchLimits(max_rows=physical))) == 1
    assert len(cut_micro_batches(GROUP.order(), MicroBatchLimits(max_rows=physical - 1))) == 2


def test_a_group_above_the_limit_is_cut_into_parts_that_fill_it() -> None:
    cut = cut_micro_batches(GROUP.order(), MicroBatchLimits(max_rows=99 + 3 * 3))
    assert sorted(map(len, cut)) == [2, 3, 3]


def test_an_oversize_tree_is_cut_where_its_branches_share_least() -> None:
    left, right = (*PROMPT, 1, 1, 1, 1), (*PROMPT, 2, 2, 2, 2)
    tree = batch_of((left, (5, 5)), (right, (5, 5)), (left, (6, 6)), (right, (6, 6)))
    cut = cut_micro_batches(tree.order(), MicroBatchLimits(max_sequences=2))
    assert sorted(map(sorted, cut)) == [[0, 2], [1, 3]]


def test_a_group_is_halved_in_the_middle_when_ranks_agree_on_more_micro_batches() -> None:
    assert sorted(map(sorted, cut_micro_batches(GROUP.order(), MicroBatchLimits(), at_least=2))) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    sizes = [len(cut) for cut in cut_micro_batches(GROUP.order(), MicroBatchLimits(), at_least=3)]
    assert sorted(sizes) == [2, 2, 4]


def test_a_tree_is_halved_where_its_branches_share_least_and_of_such_places_near_the_middle() -> None:
    parts = [(*PROMPT, b, b, b) for b in (1, 2, 3)]
    tree = batch_of(*[(parts[b], (i, i)) for b, members in enumerate((1, 3, 5)) for i in range(members)])
    cut = cut_micro_batches(tree.order(), MicroBatchLimits(), at_least=2)
    assert sorted(map(sorted, cut)) == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    cut = cut_micro_batches(tree.order(), MicroBatchLimits(), at_least=3)
    assert sorted(map(len, cut)) == [1, 3, 5], "the part with two branches has most rows, so it goes next"


def test_small_groups_are_packed_together() -> None:
    pairs = [((g, g + 1, g + 2), (i,)) for g in range(10, 90, 10) for i in range(4)]
    cut = cut_micro_batches(batch_of(*pairs).order(), MicroBatchLimits(max_rows=2 * (2 + 4)))
    assert [len(micro_batch) for micro_batch in cut] == [8, 8, 8, 8]


def test_a_system_prompt_shared_by_all_questions_does_not_tear_their_groups_apart() -> None:
    system = tuple(range(50))
    prompts = [(*system, 60 + q, *range(30)) for q in range(6)]
    batch = batch_of(*[(prompt, (i, i)) for i in range(4) for prompt in prompts])
    cut = cut_micro_batches(batch.order(), MicroBatchLimits(max_rows=150))
    assert sorted(sorted({s % 6 for s in micro_batch}) for micro_batch in cut) == [[0, 1], [2, 3], [4, 5]]
    assert [len(micro_batch) for micro_batch in cut] == [8, 8, 8]


def test_a_sequence_above_the_limit_is_refused_by_name() -> None:
    batch = batch_of(((1, 2), (3,)), ((4, 5, 6), (7, 8)))
    with pytest.raises(ValueError, match="sequence 1 alone needs 4 tokens of computation, more than the 3"):
        cut_micro_batches(batch.order(), MicroBatchLimits(max_rows=3))


def test_more_micro_batches_than_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="8 sequences cannot fill 9 micro-batches"):
        cut_micro_batches(GROUP.order(), MicroBatchLimits(), at_least=9)


def test_a_long_chain_of_turns_above_the_limit_is_cut() -> None:
    """An agent's trajectory trained turn by turn: every sequence continues the one before."""
    chain = batch_of(*[(range(turns), (5000,)) for turns in range(1, 1201)])
    cut = cut_micro_batches(chain.order(), MicroBatchLimits(max_rows=1200))
    assert sum(map(len, cut)) == 1200


def large(group_size: int, num_sequences: int = 8192) -> PrefixOrder:
    """Groups of one size with responses of many lengths."""
    responses = np.random.default_rng(0).integers(100, 200, num_sequences)
    first = np.arange(num_sequences) % group_size == 0
    return PrefixOrder(np.arange(num_sequences), 511 + responses, np.where(first, 0, 511))


@pytest.mark.parametrize(
    ("order", "limits", "at_least"),
    [
        (large(1), MicroBatchLimits(max_rows=710), 1),
        (large(1), MicroBatchLimits(max_sequences=1), 1),
        (large(1), MicroBatchLimits(max_rows=8192), 1),
        (large(8192), MicroBatchLimits(), 8192),
        (PrefixOrder(np.arange(8192), np.arange(1, 8193), np.arange(8192)), MicroBatchLimits(), 8192),
    ],
    ids=["own micro-batches", "static micro-batches", "nothing shared", "one group split up", "one chain split up"],
)
def test_a_large_batch_is_cut_in_seconds(order: PrefixOrder, limits: MicroBatchLimits, at_least: int) -> None:
    """Looking at every micro-batch for every sequence takes a minute."""
    start = time.process_time()
    cut = cut_micro_batches(order, limits, at_least)
    assert time.process_time() - start < 2
    assert sorted(s for micro_batch in cut for s in micro_batch) == list(range(8192))
    assert len(cut) >= at_least


def test_the_run_with_most_rows_is_halved() -> None:
    small = [((7, 8), (i,)) for i in range(2)]
    cut = cut_micro_batches(batch_of(*small, *[(PROMPT, (i, i)) for i in range(4)]).order(), MicroBatchLimits(), 3)
    assert sorted(map(sorted, cut)) == [[0, 1], [2, 3], [4, 5]]


def test_runs_are_packed_largest_first() -> None:
    """Two of one length and one of twice that: the long one is alone, whatever comes first in the batch."""
    unique = batch_of(((1,), (1, 1, 1, 1)), ((2,), (2, 2, 2, 2)), ((3,), [3] * 8))
    cut = cut_micro_batches(unique.order(), MicroBatchLimits(), at_least=2)
    assert sorted(map(sorted, cut)) == [[0, 1], [2]]
