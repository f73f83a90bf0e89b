"""A micro-batch that carries nothing fits the copies of its forward, and those that its backward still makes."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batching.test_copied_keys import IN_PLACE, groups_behind_a_preamble
from tests.layout.chains import tries
from tests.layout.tries import Batch, batch_of, batches
from verl_pg_plugin.batching.chains import cut_with_chains
from verl_pg_plugin.batching.copied_keys import CopiedKeys
from verl_pg_plugin.batching.keys_below_trunks import KeysBelowTrunks
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.layout.trunk_reads import read_trunks

COPIES, OF_FORWARD = IN_PLACE.copies(forward_only=False), IN_PLACE.copies(forward_only=True)


def keys_of_backward(layout: PackedLayout, copies_per_row: float) -> int:
    reads = read_trunks(layout, copies_per_row)
    return (layout if reads is None else reads.rest).num_copied_keys


@given(
    st.data(),
    st.one_of(
        tries(),
        batches(max_sequences=10, with_classes=True),
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4).map(
            lambda responses: groups_behind_a_preamble(17, responses)
        ),
    ),
)
def test_no_part_of_a_trie_has_more_keys_left_than_are_counted(data: st.DataObject, batch: Batch) -> None:
    order = batch.order()
    first = data.draw(st.integers(0, len(order.sequences) - 1))
    stop = data.draw(st.integers(first + 1, len(order.sequences)))
    layout = batch.take(order.sequences[first:stop].tolist()).layout()
    assert KeysBelowTrunks(order).of(first, stop) >= keys_of_backward(layout, copies_per_row=0.0)


@pytest.mark.parametrize("preamble", [0, 30])
def test_of_usual_groups_what_is_left_is_counted(preamble: int) -> None:
    batch = behind(preamble, [(1000, 64, 24)] * 3)
    reads = read_trunks(batch.layout())
    assert reads is not None
    assert KeysBelowTrunks(batch.order()).of(0, len(batch.sequences)) == len(reads.rest.kv_rows)


def behind(preamble: int, groups: list[tuple[int, int, int]]) -> Batch:
    """Groups of (prompt, number of responses, response) whose prompts begin with the same ``preamble`` tokens."""
    return batch_of(
        *[
            ([*range(10**7, 10**7 + preamble), *[10**6 + g] * prompt], [i] * length)
            for g, (prompt, number, length) in enumerate(groups)
            for i in range(number)
        ]
    )


def alone(batch: Batch, limits: MicroBatchLimits) -> Iterator[PackedLayout]:
    """Micro-batches that carry nothing, with chains and without."""
    plan = cut_with_chains(batch.order(), limits, IN_PLACE.weights(forward_only=False), part_cost=40.0)
    chained = [part.sequences for part in plan.parts if part.chain < 0]
    for members in [*chained, *cut_micro_batches(batch.order(), limits)]:
        yield batch.take(members).layout()


@pytest.mark.parametrize("preamble", [0, 30])
@pytest.mark.parametrize(
    ("many_copies", "few_copies", "budget"),
    [
        ([(1000, 64, 24)] * 3, [(50, 8, 1500)] * 14, 16_384),
        ([(2000, 40, 64)] * 6, [(50, 8, 2000)] * 10, 20_480),
        ([(500, 200, 8)] * 4, [(50, 4, 900)] * 9, 6_000),
    ],
)
def test_groups_with_few_copies_make_no_room_for_those_with_many(
    preamble: int, many_copies: list[tuple[int, int, int]], few_copies: list[tuple[int, int, int]], budget: int
) -> None:
    """A budget that averaged over a mini-batch would let memory end in the micro-batch of one group."""
    limits = MicroBatchLimits(budget, copies=COPIES)
    layouts = list(alone(behind(preamble, [*many_copies, *few_copies]), limits))
    assert layouts
    for layout in layouts:
        assert layout.num_rows + max(copies_of_forward(layout), copies_of_backward(layout)) <= budget


def copies_of_forward(layout: PackedLayout) -> float:
    return OF_FORWARD.take(layout.num_copied_keys, layout.num_rows)


def copies_of_backward(layout: PackedLayout) -> float:
    return COPIES.take(keys_of_backward(layout, copies_per_row=3), layout.num_rows)


def test_branches_of_branches_count_their_copies_with_gradients() -> None:
    """Attempts that go on from the middle of others: a trunk is read in place, and what branches below it is copied."""
    batch = batch_of(
        *[([*range(10**7, 10**7 + 500), *[10**6 + branch] * 300], [i] * 8) for branch in range(6) for i in range(40)]
    )
    budget = 6000
    layouts = list(alone(batch, MicroBatchLimits(budget, copies=COPIES)))
    assert any(copies_of_backward(layout) > copies_of_forward(layout) for layout in layouts)
    for layout in layouts:
        assert layout.num_rows + max(copies_of_forward(layout), copies_of_backward(layout)) <= budget


@pytest.mark.parametrize("preamble", [0, 30])
def test_many_short_responses_stay_together_behind_a_chat_template_too(preamble: int) -> None:
    order = behind(preamble, [(1000, 128, 8)] * 3).order()
    copying = CopiedKeys(COPIES.weight, COPIES.free)
    assert len(cut_micro_batches(order, MicroBatchLimits(9000, copies=COPIES))) == 1
    assert len(cut_micro_batches(order, MicroBatchLimits(9000, copies=copying))) == 3
