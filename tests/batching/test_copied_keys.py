"""Keys that attention copies are counted as the layout makes them, and cut groups where they outgrow a micro-batch."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.chains import lay_out, tries
from tests.layout.tries import Batch, batch_of, batches
from verl_pg_plugin.batching.chain_cuts import CarryWeights
from verl_pg_plugin.batching.chains import cut_with_chains
from verl_pg_plugin.batching.copied_keys import CopiedKeys, KeysOfNeighbours
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.cost.row_memory import RowMemory

SHAPE_4B = transformers.Qwen3Config(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
MEMORY = RowMemory.of(SHAPE_4B, torch.bfloat16, checkpointing=True, keeps_attention=True, kernel="torch_varlen")
IN_PLACE = RowMemory.of(SHAPE_4B, torch.bfloat16, checkpointing=True, keeps_attention=True, kernel="flash_attn_2")
"""Of a kernel whose backward reads roots where they lie."""


def grpo(prompt: int, response: int, n: int) -> Batch:
    return batch_of(*[(range(10**6, 10**6 + prompt), [i] * response) for i in range(n)])


@given(st.one_of(tries(), batches(max_sequences=10, with_classes=True)))
def test_a_whole_batch_has_the_keys_that_its_layout_gathers(batch: Batch) -> None:
    keys = KeysOfNeighbours(batch.order())
    assert int(keys.before[-1]) == len(batch.layout().kv_rows)
    if len(batch.sequences) > 1:
        assert keys.of(0, len(batch.sequences), carries=False) == len(batch.layout().kv_rows)


@given(st.integers(2, 20), st.lists(st.integers(1, 9), min_size=2, max_size=9), st.booleans(), st.data())
def test_a_part_of_a_group_has_the_keys_that_its_layout_gathers(
    prompt: int, responses: list[int], forward_only: bool, data: st.DataObject
) -> None:
    batch = batch_of(*[(range(100, 100 + prompt), [i] * length) for i, length in enumerate(responses)])
    order = batch.order()
    limits = MicroBatchLimits(max_sequences=data.draw(st.integers(1, 4)))
    weights = CarryWeights(carried=data.draw(st.sampled_from([0.0, 100.0])))
    keys, first = KeysOfNeighbours(order), 0
    for chain in cut_with_chains(order, limits, weights, part_cost=1.0).chains:
        for p in lay_out(batch, chain, forward_only):
            counted = keys.of(first, first + len(p.part.sequences), bool(p.part.num_carried))
            if chain == [p.part]:  # its own trie: in the order of the batch, wherever it stands
                counted = KeysOfNeighbours(p.batch.order()).of(0, len(p.part.sequences), carries=False)
            first += len(p.part.sequences) if len(chain) > 1 else 0
            if len(p.part.sequences) > 1:
                assert counted == len(p.layout.kv_rows)
            else:
                assert p.layout.num_copied_keys == 0
                assert counted == (p.part.num_carried + p.layout.num_rows if p.part.num_carried else 0)


@given(st.data(), tries())
def test_a_part_of_any_trie_has_the_keys_that_its_layout_gathers(data: st.DataObject, batch: Batch) -> None:
    order = batch.order()
    first = data.draw(st.integers(0, len(order.sequences) - 1))
    stop = data.draw(st.integers(first + 1, len(order.sequences)))
    layout = batch.take(order.sequences[first:stop].tolist()).layout()
    counted = KeysOfNeighbours(order).of(first, stop, carries=False)
    assert counted == (len(layout.kv_rows) if stop > first + 1 else 0)


PREAMBLE = range(10**7, 10**7 + 11)


def groups_behind_a_preamble(prompt: int, responses: list[list[int]]) -> Batch:
    """Prompts that begin with the same eleven tokens, ten rows, as with a chat template."""
    return batch_of(
        *[
            ([*PREAMBLE, *[1000 + g] * prompt], [i] * n)
            for g, lengths in enumerate(responses)
            for i, n in enumerate(lengths)
        ]
    )


@given(st.integers(1, 20), st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=5), min_size=2, max_size=4))
def test_a_group_behind_what_all_prompts_begin_with_has_the_keys_that_its_layout_gathers(
    prompt: int, responses: list[list[int]]
) -> None:
    batch = groups_behind_a_preamble(prompt, responses)
    order = batch.order()
    keys, starts = KeysOfNeighbours(order), [0, *(1 + np.flatnonzero(order.num_shared[1:] <= 10)).tolist()]
    for first, stop in zip(starts, [*starts[1:], len(order.sequences)], strict=True):
        layout = batch.take(order.sequences[first:stop].tolist()).layout()
        assert keys.of(first, stop, carries=False) == len(layout.kv_rows)


@pytest.mark.parametrize("max_rows", [990, 994, 998])
def test_parts_behind_a_preamble_that_just_fit_keep_attention(max_rows: int) -> None:
    """Counted with the preamble's keys once more, parts of several sequences would run attention again for no need."""
    order = groups_behind_a_preamble(300, [[30] * 4] * 2).order()
    limits = MicroBatchLimits(max_rows, copies=CopiedKeys(weight=1.0, free=1.0))
    parts = cut_with_chains(order, limits, CarryWeights(recomputing=0.9), part_cost=1.0).parts
    assert [len(part.sequences) for part in parts] == [2, 2, 2, 2]
    assert not any(part.recompute_attention for part in parts)


@given(st.data(), tries())
def test_many_parts_at_once_are_counted_as_one_by_one(data: st.DataObject, batch: Batch) -> None:
    keys, size = KeysOfNeighbours(batch.order()), len(batch.sequences)
    first = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5)))
    stop = np.array([data.draw(st.integers(a + 1, size)) for a in first.tolist()])
    for carries in (False, True):
        one_by_one = [keys.of(a, b, carries) for a, b in zip(first.tolist(), stop.tolist(), strict=True)]
        assert keys.of_each(first, stop, carries).tolist() == one_by_one


def test_the_first_copies_of_a_row_are_free_and_those_above_take_their_weight() -> None:
    copies = CopiedKeys(weight=0.5, free=4.0)
    assert [copies.take(keys, rows=10) for keys in (10, 40, 42)] == [0.0, 0.0, 1.0]
    assert copies.take_each(np.array([10, 42]), np.array([10, 10])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("forward_only", [True, False])
def test_a_usual_group_takes_what_it_took(forward_only: bool) -> None:
    """P 4096, R 1024, n 4 copies 3 keys per row."""
    copies, order = MEMORY.copies(forward_only), grpo(4096, 1024, 4).order()
    rows = int(order.num_new.sum())
    assert copies.take(KeysOfNeighbours(order).of(0, 4, carries=False), rows) == 0
    limits = MicroBatchLimits(rows, copies=copies)
    assert len(cut_with_chains(order, limits, MEMORY.weights(forward_only)).parts) == 1
    assert len(cut_micro_batches(order, limits)) == 1


SHORT_RESPONSES, BUDGET = grpo(1024, 8, 256), 4096


def test_short_responses_to_a_long_prompt_are_cut_into_carried_parts_that_copy_less() -> None:
    """86 keys per row, as P 8192, R 64, n 256, where the backward of a layer would hold 49 GiB of them."""
    order, weights = SHORT_RESPONSES.order(), MEMORY.weights(forward_only=False)
    assert len(cut_with_chains(order, MicroBatchLimits(BUDGET), weights).parts) == 1
    copies = MEMORY.copies(forward_only=False)
    plan = cut_with_chains(order, MicroBatchLimits(BUDGET, copies=copies), weights, part_cost=40.0)
    assert (plan.num_chains, plan.recomputed_rows) == (1, 0)
    assert len(plan.parts) > 3
    for part in plan.parts:
        layout = SHORT_RESPONSES.take(part.sequences).layout()  # with the prompt's rows, which a carried part has not
        keys = layout.num_copied_keys - part.num_carried
        taken = part.num_rows + copies.take(keys, part.num_rows) + weights.carried * part.num_carried
        assert taken + weights.owed * (part.read_next - part.keep) <= BUDGET
        assert keys * (MEMORY.copy + MEMORY.copy_gradients) < BUDGET * (MEMORY.activations + 2 * MEMORY.mlp)


def test_parts_that_other_ranks_ask_for_are_counted_alike() -> None:
    order, weights, copies = SHORT_RESPONSES.order(), MEMORY.weights(False), MEMORY.copies(False)
    plan = cut_with_chains(order, MicroBatchLimits(BUDGET, copies=copies), weights, at_least=40, part_cost=40.0)
    assert len(plan.parts) == 40
    for part in plan.parts:
        layout = SHORT_RESPONSES.take(part.sequences).layout()
        keys = layout.num_copied_keys - part.num_carried if len(part.sequences) > 1 else 0
        assert part.num_rows + copies.take(keys, part.num_rows) + weights.carried * part.num_carried <= BUDGET


def test_without_carrying_they_are_cut_too() -> None:
    order = SHORT_RESPONSES.order()
    assert len(cut_micro_batches(order, MicroBatchLimits(BUDGET))) == 1
    copies = MEMORY.copies(forward_only=False)
    cut = cut_micro_batches(order, MicroBatchLimits(BUDGET, copies=copies))
    assert len(cut) > 3
    for members in cut:
        layout = SHORT_RESPONSES.take(members).layout()
        assert layout.num_rows + copies.take(layout.num_copied_keys, layout.num_rows) <= BUDGET


def test_half_as_many_stay_whole_where_the_backward_copies_no_roots() -> None:
    batch, weights = grpo(1024, 8, 128), IN_PLACE.weights(forward_only=False)
    order, layout = batch.order(), batch.layout()
    limits, copying = (MicroBatchLimits(BUDGET, copies=memory.copies(False)) for memory in (IN_PLACE, MEMORY))
    assert len(cut_with_chains(order, limits, weights).parts) == len(cut_micro_batches(order, limits)) == 1
    assert len(cut_with_chains(order, copying, weights).parts) > 1
    assert len(cut_micro_batches(order, copying)) > 1
    taken = layout.num_rows + IN_PLACE.copies(forward_only=True).take(layout.num_copied_keys, layout.num_rows)
    assert layout.num_rows < taken <= BUDGET, "copies of the forward count"
    tight = MicroBatchLimits(int(taken) - 1, copies=limits.copies)
    assert len(cut_with_chains(order, tight, weights).parts) > 1
    assert len(cut_micro_batches(order, tight)) > 1


def test_parts_of_a_chain_count_gradients_of_copies_whatever_the_kernel() -> None:
    """They join carried rows and own ones, and copy both."""
    order, weights = grpo(1024, 8, 512).order(), IN_PLACE.weights(forward_only=False)
    copies = IN_PLACE.copies(forward_only=False)
    plan = cut_with_chains(order, MicroBatchLimits(BUDGET, copies=copies), weights, part_cost=40.0)
    assert plan.num_chains == 1
    expected = cut_with_chains(order, MicroBatchLimits(BUDGET, copies=MEMORY.copies(False)), weights, part_cost=40.0)
    assert plan == expected


def test_turns_that_continue_one_another_stay_whole() -> None:
    turns = batch_of(*[(range(6 * k + 3), range(6 * k + 3, 6 * k + 6)) for k in range(200)])
    copies = MEMORY.copies(forward_only=False)
    assert len(cut_with_chains(turns.order(), MicroBatchLimits(1200, copies=copies), CarryWeights(0.5, 0.5)).parts) == 1
