"""Chains over random tries: nobody is lost, budgets hold with what is carried, and no cheaper cut exists."""

import time
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.chains import limits_for, plans, tries
from tests.layout.tries import Batch, batch_of, batches
from verl_pg_plugin.batching.chain_cuts import CarryCosts, CarryWeights, Cut, CutMaths
from verl_pg_plugin.batching.chains import ChainPlan, Part, cut_with_chains, first_head, num_rows
from verl_pg_plugin.batching.copied_keys import CopiedKeys
from verl_pg_plugin.batching.cut_search import _Search, cut_tries
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits
from verl_pg_plugin.layout import PrefixOrder

ANY_BATCH = st.one_of(tries(), batches(max_sequences=10, with_classes=True))
FREE = CarryWeights()
PROMPT = tuple(range(100, 200))
GROUP = batch_of(*[(PROMPT, (i, i, i)) for i in range(8)])


def budget_of(part: Part, weights: CarryWeights, row: float = 1.0) -> float:
    return row * part.num_rows + weights.carried * part.num_carried + weights.owed * (part.read_next - part.keep)


def draw_weights(data: st.DataObject) -> CarryWeights:
    carried, owed, recomputing = [0.0, 0.5, 1.5], [0.0, 0.5], [0.5, 1.0]
    return CarryWeights(*(data.draw(st.sampled_from(values)) for values in (carried, owed, recomputing)))


@given(st.data(), ANY_BATCH)
def test_every_sequence_is_trained_on_exactly_once(data: st.DataObject, batch: Batch) -> None:
    plan = data.draw(plans(batch))
    assert sorted(s for part in plan.parts for s in part.sequences) == list(range(len(batch.sequences)))


@given(st.data(), ANY_BATCH)
def test_what_a_micro_batch_computes_carries_and_owes_fits_into_memory(data: st.DataObject, batch: Batch) -> None:
    limits = data.draw(limits_for(batch))
    weights = draw_weights(data)
    for part in data.draw(plans(batch, limits=limits, weights=weights, at_least=1)).parts:
        assert part.num_rows > 0
        assert limits.max_sequences is None or len(part.sequences) <= limits.max_sequences
        most = np.inf if limits.max_rows is None else limits.max_rows
        assert part.recompute_attention == (budget_of(part, weights) > most)
        assert budget_of(part, weights, weights.recomputing if part.recompute_attention else 1.0) <= most
        assert not part.recompute_attention or len(part.sequences) == 1


@given(st.data(), ANY_BATCH)
def test_parts_of_several_sequences_that_other_ranks_ask_for_fit_into_memory_too(
    data: st.DataObject, batch: Batch
) -> None:
    limits, weights = data.draw(limits_for(batch)), draw_weights(data)
    for part in data.draw(plans(batch, limits=limits, weights=weights)).parts:
        assert part.num_rows > 0
        if len(part.sequences) > 1:
            assert limits.max_rows is None or budget_of(part, weights) <= limits.max_rows
            assert limits.max_sequences is None or len(part.sequences) <= limits.max_sequences


@given(st.data(), ANY_BATCH)
def test_figures_count_rows_by_their_tokens(data: st.DataObject, batch: Batch) -> None:
    plan = data.draw(plans(batch, forward_only=False))
    assert plan.num_chains == sum(len(chain) > 1 for chain in plan.chains)
    assert plan.carried_rows == sum(part.num_carried for part in plan.parts)
    assert plan.exported_rows == sum(part.num_carried - part.keep for part in plan.parts)
    assert plan.recomputed_rows == sum(part.num_rows for part in plan.parts) - len(batch.rows())
    for chain in plan.chains:
        assert (chain[0].num_carried, chain[-1].read_next) == (0, 0)
        assert [a.read_next for a in chain[:-1]] == [b.num_carried for b in chain[1:]]
        assert len(chain) == 1 or len({part.chain for part in chain} - {-1}) == 1


@given(st.data(), ANY_BATCH)
def test_ranks_that_agree_on_a_number_of_micro_batches_get_at_least_that_many(
    data: st.DataObject, batch: Batch
) -> None:
    at_least = data.draw(st.integers(1, len(batch.sequences)))
    assert len(data.draw(plans(batch, at_least=at_least)).parts) >= at_least
    free = cut_with_chains(batch.order(), MicroBatchLimits(), FREE, at_least)
    assert len(free.parts) == at_least


@given(st.data(), ANY_BATCH)
def test_a_group_that_fits_stays_whole_unless_ranks_need_more(data: st.DataObject, batch: Batch) -> None:
    limits = data.draw(limits_for(batch))
    place = {
        s: i for i, part in enumerate(data.draw(plans(batch, limits=limits, at_least=1)).parts) for s in part.sequences
    }
    for root in {(batch.class_of(s), tokens[:2]) for s, tokens in enumerate(batch.sequences)}:
        group = [s for s, tokens in enumerate(batch.sequences) if (batch.class_of(s), tokens[:2]) == root]
        if limits.admit(len(batch.take(group).rows()), len(group)):
            assert len({place[s] for s in group}) == 1


def every_cut(size: int) -> list[list[Cut]]:
    """All ways to cut a trie and to start the pieces."""
    ways = []
    for bits in product((0, 1), repeat=size - 1):
        bounds = [0, *(i + 1 for i, bit in enumerate(bits) if bit), size]
        for carries in product((False, True), repeat=len(bounds) - 2):
            starts = (False, *carries)
            ways.append([Cut(a, b, c) for (a, b), c in zip(pairwise(bounds), starts, strict=True)])
    return ways


@given(st.data())
def test_no_cheaper_way_to_cut_a_trie_exists(data: st.DataObject) -> None:
    """Against all cuts of it, with the price of each written out once more."""
    shared = np.array([0, *data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))])
    rows = [data.draw(st.integers(max(a, b, 1), max(a, b) + 3)) for a, b in pairwise([*shared.tolist(), 0])]
    order = PrefixOrder(np.arange(len(shared)), np.array(rows), shared)
    copies = CopiedKeys(data.draw(st.sampled_from([0.0, 0.25, 1.0])), data.draw(st.sampled_from([1.0, 2.0])))
    limits = MicroBatchLimits(
        data.draw(st.integers(max(rows), 2 * max(rows)) | st.none()), data.draw(st.integers(1, 4)), copies
    )
    weights = draw_weights(data)
    export, fixed = data.draw(st.sampled_from([0.0, 0.25, 1.0])), data.draw(st.sampled_from([0.0, 3.0]))

    def price(cuts: list[Cut]) -> float:
        total = 0.0
        for k, cut in enumerate(cuts):
            inside = range(cut.first, cut.stop)
            carried = shared[cut.first] if cut.carries else 0
            read = shared[cut.stop] if k + 1 < len(cuts) and cuts[k + 1].carries else 0
            keep = min(carried, read, *(shared[i] for i in inside if i > cut.first))
            own = sum(rows[i] - shared[i] for i in inside) + shared[cut.first] - carried
            row = weights.recomputing if len(inside) == 1 else 1.0
            taken = row * own + weights.carried * carried + weights.owed * (read - keep)
            taken += copies.take(maths.keys.of(cut.first, cut.stop, cut.carries), own)
            fits = limits.max_rows is None or taken <= limits.max_rows
            if not own or not (fits and len(inside) <= limits.max_sequences):
                return np.inf
            total += fixed + (shared[cut.first] if not cut.carries else 0)
            total += export * (carried - keep + fixed) if carried > keep else 0
        return total

    maths = CutMaths(order, limits, weights, CarryCosts(export, fixed))
    found = cut_tries(maths, [(0, len(rows))])[0]
    assert price(found) == pytest.approx(min(map(price, every_cut(len(rows)))))


def test_tries_cut_together_are_cut_as_each_one_alone() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 30, size=40)
    shared = rng.integers(1, 60, size=sizes.sum())
    shared[np.cumsum(sizes) - sizes] = 0
    order = PrefixOrder(np.arange(len(shared)), np.maximum(shared, np.append(shared[1:], 0)) + 20, shared)
    maths = CutMaths(order, MicroBatchLimits(200), CarryWeights(0.5, 0.5), CarryCosts(0.25, 4.0))
    spans = [(int(stop - size), int(stop)) for stop, size in zip(np.cumsum(sizes), sizes, strict=True)]
    assert cut_tries(maths, spans) == [cut_tries(maths, [span])[0] for span in spans]


def test_a_trie_is_cut_alike_one_end_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parts of a block of ends have in common is handed on to the next block."""
    rng = np.random.default_rng(0)
    shared = np.append(0, rng.integers(1, 60, size=299))
    order = PrefixOrder(np.arange(300), np.maximum(shared, np.append(shared[1:], 0)) + 20, shared)
    limits = MicroBatchLimits(1500, copies=CopiedKeys(weight=1.0, free=1.0))
    maths = CutMaths(order, limits, CarryWeights(0.5, 0.5), CarryCosts(0.25, 400.0))
    in_blocks = cut_tries(maths, [(0, 300)])
    monkeypatch.setattr(_Search, "ELEMENTS", 1)
    assert cut_tries(maths, [(0, 300)]) == in_blocks


@pytest.mark.parametrize(("group_size", "response"), [(256, 512), (8192, 512), (8192, 64)])
def test_a_large_batch_is_cut_into_chains_in_seconds(group_size: int, response: int) -> None:
    """With copied keys counted; looking at all starts for every end, one at a time, takes a minute for 65,536."""
    rows = 2047 + np.random.default_rng(0).integers(response // 2, response, 8192)
    order = PrefixOrder(np.arange(8192), rows, np.where(np.arange(8192) % group_size, 2047, 0))
    limits = MicroBatchLimits(16_384, copies=CopiedKeys(weight=0.04, free=5.75))
    start = time.process_time()
    plan = cut_with_chains(order, limits, CarryWeights(0.745, 0.497, 0.4))
    assert time.process_time() - start < 2
    assert plan.num_chains == 8192 // group_size
    assert plan.recomputed_rows == 0


@pytest.mark.slow
def test_two_parts_for_each_of_many_groups_are_made_equal_in_seconds() -> None:
    """Log-probs of 65,536 short responses, cut by what attention copies; a search from far off takes eight passes."""
    rows = 2047 + np.random.default_rng(0).integers(32, 64, 65_536)
    order = PrefixOrder(np.arange(65_536), rows, np.where(np.arange(65_536) % 256, 2047, 0))
    limits = MicroBatchLimits(16_384, copies=CopiedKeys(weight=0.0085, free=15.25))
    start = time.process_time()
    plan = cut_with_chains(order, limits, CarryWeights(0.305, 0.305), forward_only=True)
    assert time.process_time() - start < 2
    assert (len(plan.parts), plan.num_chains, plan.recomputed_rows) == (512, 256, 0)
    rows_of_parts = np.array([[part.num_rows for part in chain] for chain in plan.chains])
    assert rows_of_parts.min() > 0.85 * rows_of_parts.max()


def plan_group(max_rows: int | None, **options: float) -> ChainPlan:
    weights = CarryWeights(options.pop("carried", 0.0), options.pop("owed", 0.0))
    return cut_with_chains(GROUP.order(), MicroBatchLimits(max_rows), weights, **({"part_cost": 4.0} | options))


def test_a_prompt_that_nearly_fills_the_budget_is_computed_once() -> None:
    plan = plan_group(99 + 3)
    assert (plan.num_chains, plan.recomputed_rows, plan.exported_rows) == (1, 0, 99)
    assert sum(part.num_rows for part in plan.parts) == 99 + 8 * 3


def test_parts_of_a_chain_are_of_one_size() -> None:
    long = batch_of(*[(range(10), [i] * 30) for i in range(9)])
    plan = cut_with_chains(long.order(), MicroBatchLimits(180), FREE, part_cost=4.0)
    assert [part.num_rows for part in plan.parts] == [159, 120] or [part.num_rows for part in plan.parts] == [129, 150]


def test_a_forward_only_phase_carries_without_exporting() -> None:
    plan = plan_group(110, forward_only=True)
    assert (plan.num_chains, plan.recomputed_rows, plan.exported_rows) == (1, 0, 0)
    assert plan.carried_rows == 99 * (len(plan.parts) - 1)


def test_a_tiny_prefix_is_computed_again_rather_than_exported() -> None:
    tiny = batch_of(*[(range(9), [i] * 50) for i in range(8)])
    update = cut_with_chains(tiny.order(), MicroBatchLimits(210), FREE)
    assert (update.num_chains, update.exported_rows) == (0, 0)
    assert update.recomputed_rows == 8 * (len(update.parts) - 1)
    assert cut_with_chains(tiny.order(), MicroBatchLimits(210), FREE, forward_only=True).num_chains == 1


def test_what_is_carried_takes_room_in_the_budget() -> None:
    assert len(plan_group(106).parts) == 2
    assert len(plan_group(106, carried=1.0).parts) == 4


def test_a_prompt_is_computed_again_where_its_owner_has_no_room_for_what_it_is_owed() -> None:
    def plan(owed: float, recomputing: float) -> ChainPlan:
        return cut_with_chains(
            GROUP.order(), MicroBatchLimits(103), CarryWeights(0.5, owed, recomputing), part_cost=4.0
        )

    assert plan(owed=0.5, recomputing=1.0).num_chains == 0
    spared = plan(owed=0.5, recomputing=0.5)
    assert (spared.num_chains, spared.recomputed_rows) == (1, 0)
    assert [part.recompute_attention for part in spared.parts] == [True, *[False] * (len(spared.parts) - 1)]
    assert plan(owed=0.75, recomputing=0.5).num_chains == 0


def test_a_micro_batch_size_in_sequences_makes_chains_too() -> None:
    plan = cut_with_chains(GROUP.order(), MicroBatchLimits(max_sequences=2), FREE, part_cost=4.0)
    assert [len(part.sequences) for part in plan.parts] == [2, 2, 2, 2]
    assert (plan.num_chains, plan.exported_rows, plan.recomputed_rows) == (1, 99, 0)


def test_a_whole_group_is_split_into_a_chain_where_ranks_need_more_micro_batches() -> None:
    plan = cut_with_chains(GROUP.order(), MicroBatchLimits(), FREE, at_least=3, part_cost=4.0)
    assert (len(plan.parts), plan.num_chains, plan.recomputed_rows) == (3, 1, 0)


def test_small_groups_fill_the_room_that_parts_have_left() -> None:
    small = [((7, i), (1, 2)) for i in range(3)]
    batch = batch_of(*small, *[(PROMPT, (i, i, i)) for i in range(8)])
    plan = cut_with_chains(batch.order(), MicroBatchLimits(120), FREE, part_cost=4.0)
    assert [part.chain for part in plan.parts] == [0, 0]
    assert sum(len(part.sequences) - part.num_chain for part in plan.parts) == 3


def test_equal_sequences_never_make_a_part_without_rows() -> None:
    same = batch_of(*[(PROMPT, (1, 2, 3))] * 6, (PROMPT, (4, 5)))
    for at_least in range(1, 8):
        plan = cut_with_chains(same.order(), MicroBatchLimits(), FREE, at_least, part_cost=1.0)
        assert len(plan.parts) == at_least
        assert all(part.num_rows for part in plan.parts)


def test_the_head_starts_at_the_shortest_prompt_of_the_chain() -> None:
    plan = plan_group(110)
    assert first_head(plan.chains[0], np.array([100] * 7 + [40])) == 39


def test_a_sequence_that_no_micro_batch_holds_is_named() -> None:
    with pytest.raises(ValueError, match=r"alone needs 102 tokens.*ppo_max_token_len_per_gpu"):
        plan_group(101)


def test_more_micro_batches_than_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="8 sequences cannot fill 9 micro-batches"):
        plan_group(None, at_least=9)


def behind(preamble: tuple[int, ...], num_groups: int = 4) -> Batch:
    """Groups of 8, each with a prompt of 100 tokens of its own, and one short prompt; all begin with ``preamble``."""
    prompts = [preamble + tuple(range(1000 * (g + 1), 1000 * (g + 1) + 100)) for g in range(num_groups)]
    return batch_of(*[(prompt, (i,) * 30) for prompt in prompts for i in range(8)], ((*preamble, 7), (1, 2, 3)))


def test_a_chat_template_that_all_prompts_share_does_not_make_one_chain_of_them() -> None:
    """Else parts of other prompts would wait for each other, and their rows would begin where the shortest does."""
    limits = MicroBatchLimits(max_rows=256)
    alone, together = (
        cut_with_chains(batch.order(), limits, FREE, part_cost=4.0) for batch in (behind(()), behind((1, 2, 3)))
    )
    assert together.num_chains == alone.num_chains == 4
    for chain in together.chains:
        of_the_chain = {s // 8 for part in chain for s in part.sequences[: part.num_chain]}
        assert len(of_the_chain) <= 1
    lengths = np.array(behind((1, 2, 3)).prompt_lengths)
    assert [first_head(chain, lengths) for chain in together.chains[:4]] == [102] * 4
    assert max(part.num_rows for part in together.parts) <= 256


def test_a_long_preamble_is_carried_from_group_to_group() -> None:
    limits = MicroBatchLimits(max_rows=256)
    plan = cut_with_chains(behind(tuple(range(60))).order(), limits, FREE, part_cost=4.0)
    assert any(len({s // 8 for part in chain for s in part.sequences[: part.num_chain]}) > 1 for chain in plan.chains)


@given(st.data(), ANY_BATCH)
def test_sequences_that_are_no_neighbours_share_what_all_between_them_do(data: st.DataObject, batch: Batch) -> None:
    order = batch.order()
    places = sorted(data.draw(st.sets(st.integers(0, len(batch.sequences) - 1), min_size=1)))
    sequences = order.sequences[places].tolist()
    assert num_rows(order, np.array(places)) == len(batch.take(sequences).rows())


def test_a_part_keeps_what_all_of_its_sequences_share_with_the_next_one() -> None:
    """It carries 5 rows and the next one 4, but a sequence in between branches off after 2."""
    order = PrefixOrder(np.arange(4), np.full(4, 9), np.array([0, 5, 2, 4]))
    maths = CutMaths(order, MicroBatchLimits(), FREE, CarryCosts(0.25, 4.0))
    assert maths.keep(Cut(1, 3, carries=True), Cut(3, 4, carries=True)) == 2
    assert maths.keep(Cut(1, 2, carries=True), Cut(2, 4, carries=True)) == 2
    assert maths.keep(Cut(1, 3, carries=True), None) == 0


def test_a_group_behind_a_short_prefix_has_room_for_it_too() -> None:
    """Two responses of 14 fit beside the 100 rows of their prompt, and not beside two more of a chat template."""
    groups = [((1, 2, 3, *range(1000 * g, 1000 * g + 100)), (i,) * 14) for g in (1, 2) for i in range(11)]
    plan = cut_with_chains(batch_of(*groups).order(), MicroBatchLimits(max_rows=128), FREE, part_cost=4.0)
    assert plan.num_chains == 2
    assert max(part.num_rows for part in plan.parts) <= 128
