"""Chains over random tries: each row is owned once, reads its ancestors, and gets every gradient owed to it."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.chains import LaidOut, lay_out, plans, tries, walk_backward, walk_forward
from tests.layout.tries import Batch, Key, batch_of, batches
from verl_pg_plugin.cost.pairs import num_pairs
from verl_pg_plugin.layout.carried import CarriedLayout, ChainPart, build_carried_layout, idle_export

ANY_BATCH = st.one_of(tries(), batches(max_sequences=10), batches(max_sequences=10, with_classes=True))


def readable(layout: CarriedLayout) -> list[list[int]]:
    """For every own row, the indices into [carried | own] that its query may see: causal, aligned at the end."""
    seen = []
    keys = [layout.kv_rows[a:b].tolist() for a, b in pairwise(layout.cu_seqlens_k.tolist())]
    for path, (a, b) in zip(keys, pairwise(layout.cu_seqlens_q.tolist()), strict=True):
        seen.extend(path[: len(path) - (b - a) + i + 1] for i in range(b - a))
    return seen


def ancestors(key: tuple[int, Key]) -> list[tuple[int, Key]]:
    return [(key[0], key[1][: t + 2]) for t in range(len(key[1]) - 1)]


@given(st.data(), ANY_BATCH, st.booleans())
def test_every_row_is_computed_by_one_part_of_its_chain(data: st.DataObject, batch: Batch, forward_only: bool) -> None:
    for chain in data.draw(plans(batch)).chains:
        parts, rows = lay_out(batch, chain, forward_only), chain_rows(batch, chain)
        owned = Counter(key for p in parts for key in p.own_keys if key in rows)
        assert owned == Counter(rows) + Counter(key for key in filler_rows(batch, chain) if key in rows)
        for p in parts:
            assert p.layout.num_rows == p.part.num_rows == len(p.own_keys)
            assert p.layout.input_ids.tolist() == [key[-2] for _, key in p.own_keys]
            assert p.layout.labels.tolist() == [key[-1] for _, key in p.own_keys]
            assert p.layout.position_ids.tolist() == [len(key) - 2 for _, key in p.own_keys]
            assert p.layout.num_logical_tokens == sum(map(len, p.batch.sequences))


def chain_rows(batch: Batch, chain: list) -> set[tuple[int, Key]]:
    """Rows of the chain's sequences; of an ordinary micro-batch, all."""
    return batch.take([s for part in chain for s in part.sequences[: part.num_chain or None]]).rows()


def filler_rows(batch: Batch, chain: list) -> list[tuple[int, Key]]:
    """Rows of what fills parts: it reads none of the others, so prefixes that it shares are computed again."""
    return [key for part in chain if part.num_chain for key in batch.take(part.sequences[part.num_chain :]).rows()]


@given(st.data(), ANY_BATCH)
def test_a_query_sees_its_ancestors_in_order_and_nothing_else(data: st.DataObject, batch: Batch) -> None:
    for chain in data.draw(plans(batch)).chains:
        for p in lay_out(batch, chain, forward_only=False):
            seen = readable(p.layout)
            assert [[p.keys[row] for row in rows] for rows in seen] == [ancestors(key) for key in p.own_keys]
            assert num_pairs(p.layout) == sum(map(len, seen))
            segment_rows = [len(seen[row]) - 1 for row in p.layout.cu_seqlens_q[:-1].tolist()]
            assert p.layout.segment_start.tolist() == segment_rows
            export = p.layout.export
            if export is not None:
                path = p.keys[: p.layout.num_carried]
                assert [[path[row] for row in rows] for rows in readable(export)] == [
                    ancestors(key) for key in path[p.part.keep :]
                ]


@given(st.data(), ANY_BATCH)
def test_a_part_copies_no_key_only_where_it_reads_every_row_once(data: st.DataObject, batch: Batch) -> None:
    for chain in data.draw(plans(batch)).chains:
        for p in lay_out(batch, chain, forward_only=False):
            for layout in (p.layout, p.layout.export):
                if layout is not None:
                    as_they_are = layout.kv_rows.tolist() == list(range(layout.num_carried + layout.num_rows))
                    assert layout.num_copied_keys == (0 if as_they_are else len(layout.kv_rows))
            assert p.layout.export is None or not p.layout.export.num_copied_keys


def test_a_part_that_begins_with_a_duplicate_picks_the_carried_rows_that_it_reads() -> None:
    batch = batch_of(*[(range(20), (1, 2, 3))] * 2, (range(20), (4, 5)))
    part = ChainPart(num_chain=2, num_carried=22, keep=19)
    mine, options = batch.take([1, 2]), {"first_head": 19, "forward_only": True}
    layout = build_carried_layout(mine.tokens, mine.offsets, np.full(2, 20), part=part, **options)
    assert layout.kv_rows.tolist() == [*range(19), 22, 23]
    assert layout.num_copied_keys == 21


@given(st.data(), ANY_BATCH)
def test_a_segment_follows_its_parent_unless_that_is_carried(data: st.DataObject, batch: Batch) -> None:
    for chain in data.draw(plans(batch)).chains:
        for p in lay_out(batch, chain, forward_only=True):
            layout, seen = p.layout, readable(p.layout)
            assert (np.diff(layout.cu_seqlens_q) > 0).all()
            for segment, parent in enumerate(layout.segment_parent.tolist()):
                before = seen[int(layout.cu_seqlens_q[segment])][:-1]
                if parent >= 0:
                    assert before[-1] - layout.num_carried == layout.cu_seqlens_q[parent + 1] - 1
                else:
                    assert not before or before[-1] < layout.num_carried
        roots = sum(p.layout.num_roots for p in lay_out(batch, chain, forward_only=True))
        if all(len(part.sequences) == part.num_chain for part in chain):
            assert roots == 1


@given(st.data(), ANY_BATCH)
def test_without_gradient_a_part_finds_on_the_stack_what_earlier_parts_left(data: st.DataObject, batch: Batch) -> None:
    def visit(p: LaidOut, carried: list) -> list:
        assert [key for key, _ in carried] == p.keys[: p.layout.num_carried]
        assert p.layout.export is None
        heads = set(p.layout.head_rows.tolist())
        check_heads(p, [has_head for _, has_head in carried])
        return [(key, row in heads) for row, key in enumerate(p.own_keys)]

    for chain in data.draw(plans(batch)).chains:
        walk_forward(lay_out(batch, chain, forward_only=True), visit)


def check_heads(p: LaidOut, carried_has_head: list[bool]) -> None:
    """Every response token is read from a row with its path and label that has been through the head."""
    layout = p.layout
    assert all(carried_has_head[position] for position in layout.carried_heads.tolist())
    read = [*layout.carried_heads.tolist(), *(layout.num_carried + layout.head_rows).tolist()]
    logical = dict(zip(layout.response_index.tolist(), layout.response_head.tolist(), strict=True))
    expected = {
        int(p.batch.offsets[s]) + t: (p.batch.class_of(s), tokens[: t + 2])
        for s, tokens in enumerate(p.batch.sequences)
        for t in range(p.batch.prompt_lengths[s] - 1, len(tokens) - 1)
    }
    assert {index: p.keys[read[head]] for index, head in logical.items()} == expected
    for row, sequence in zip(layout.head_rows.tolist(), layout.head_sequence.tolist(), strict=True):
        assert p.batch.sequences[sequence][: len(p.own_keys[row][1])] == p.own_keys[row][1]
        assert p.batch.class_of(sequence) == p.own_keys[row][0]


@given(st.data(), ANY_BATCH)
def test_an_export_computes_what_the_stack_lacks_with_the_heads_it_needs(data: st.DataObject, batch: Batch) -> None:
    def export(p: LaidOut, layout: CarriedLayout, carried: list) -> list:
        path = p.keys[: p.layout.num_carried]
        assert [key for key, _ in carried] == path[: layout.num_carried]
        own = path[layout.num_carried :]
        assert layout.input_ids.tolist() == [key[-2] for _, key in own]
        assert layout.labels.tolist() == [key[-1] for _, key in own]
        assert layout.position_ids.tolist() == [len(key) - 2 for _, key in own]
        assert not len(layout.response_index)
        assert not len(layout.response_head)
        assert layout.handover[layout.handover_heads].tolist() == layout.head_rows.tolist()
        assert len(layout.head_sequence) == len(layout.head_rows)
        assert not layout.head_sequence.any()
        heads = set(layout.head_rows.tolist())
        return [(key, row in heads) for row, key in enumerate(own)]

    def visit(p: LaidOut, carried: list, owed: list) -> list:
        assert [key for key, _ in carried] == p.keys[: p.layout.num_carried]
        check_heads(p, [has_head for _, has_head in carried])
        assert set(p.layout.handover[p.layout.handover_heads].tolist()) <= set(p.layout.head_rows.tolist())
        return [0] * p.layout.num_carried

    for chain in data.draw(plans(batch)).chains:
        walk_backward(lay_out(batch, chain, forward_only=False), export, visit)


@given(st.data(), ANY_BATCH)
def test_every_gradient_reaches_the_owner_of_the_row_exactly_once(data: st.DataObject, batch: Batch) -> None:
    """Keys' gradients by (reader, row), and head outputs' by response token: counted, none lost, none twice."""
    for chain in data.draw(plans(batch)).chains:
        received: Counter = Counter()

        def export(p: LaidOut, layout: CarriedLayout, carried: list) -> list:
            return list(p.keys[layout.num_carried : p.layout.num_carried])

        def visit(p: LaidOut, carried: list, owed: list, received: Counter = received) -> list:
            layout, c = p.layout, p.layout.num_carried
            sums = [Counter() for _ in p.keys]
            for query, rows in enumerate(readable(layout)):
                for row in rows:
                    sums[row][p.own_keys[query]] += 1
            heads = [*layout.carried_heads.tolist(), *(c + layout.head_rows).tolist()]
            for index, head in zip(layout.response_index.tolist(), layout.response_head.tolist(), strict=True):
                s = int(np.searchsorted(p.batch.offsets, index, side="right")) - 1
                sums[heads[head]]["token", p.part.sequences[s], index - int(p.batch.offsets[s])] += 1
            for row, more in zip(layout.handover.tolist(), owed, strict=True):
                sums[c + row] += more
            for key, total in zip(p.own_keys, sums[c:], strict=True):
                received.update({(key, reader): times for reader, times in total.items()})
            return sums[:c]

        walk_backward(lay_out(batch, chain, forward_only=False), export, visit, nothing=Counter())
        members = [(s, part) for part in chain for s in part.sequences]
        expected = Counter(
            (row, ("token", s, len(row[1]) - 2))
            for s, _ in members
            for row in ancestors((batch.class_of(s), batch.sequences[s]))
            if len(row[1]) - 1 >= batch.prompt_lengths[s]
        )
        rows = [key for p in lay_out(batch, chain, forward_only=False) for key in p.own_keys]
        expected.update((row, key) for key in rows for row in ancestors(key))
        assert received == expected


@given(st.data(), ANY_BATCH)
def test_attention_over_parts_equals_attention_of_every_sequence_alone(data: st.DataObject, batch: Batch) -> None:
    rng = np.random.default_rng(0)
    vectors = {key: rng.normal(size=(3, 4)) for key in sorted(batch.rows())}  # q, k, v of each row

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        weights = np.exp(k @ q)
        return weights @ v / weights.sum()

    for chain in data.draw(plans(batch)).chains:

        def visit(p: LaidOut, carried: list) -> list:
            own = [vectors[key] for key in p.own_keys]
            kv = np.array([*carried, *own])
            out = [attend(q[0], kv[rows, 1], kv[rows, 2]) for q, rows in zip(own, readable(p.layout), strict=True)]
            for key, got in zip(p.own_keys, out, strict=True):
                path = np.array([vectors[row] for row in ancestors(key)])
                np.testing.assert_allclose(got, attend(path[-1, 0], path[:, 1], path[:, 2]), rtol=1e-12)
            return own

        walk_forward(lay_out(batch, chain, forward_only=True), visit)


@given(batches())
def test_a_rank_without_exports_runs_one_row_that_nobody_reads(batch: Batch) -> None:
    idle = idle_export(batch.tokens, batch.offsets)
    first = batch.sequences[0]
    assert (idle.input_ids.tolist(), idle.labels.tolist(), idle.position_ids.tolist()) == ([first[0]], [first[1]], [0])
    assert (idle.num_carried, idle.kv_rows.tolist(), num_pairs(idle)) == (0, [0], 1)
    assert idle.num_logical_tokens == len(first)
    assert not len(idle.handover)
    assert not len(idle.handover_heads)
    assert not len(idle.response_head)


GROUP = batch_of(*[(range(20), (i, i, i)) for i in range(4)])
FIRST = ChainPart(num_chain=4, read_next=19)


def lay_group_out(part: ChainPart, first_head: int = 19) -> CarriedLayout:
    options = {"part": part, "first_head": first_head, "forward_only": True}
    return build_carried_layout(GROUP.tokens, GROUP.offsets, np.full(4, 20), **options)


@pytest.mark.parametrize("wrong", [{"read_next": 25}, {"num_carried": 10}, {"num_carried": 40, "read_next": 0}])
def test_numbers_of_another_batch_are_refused(wrong: dict) -> None:
    assert lay_group_out(FIRST).num_rows == 31
    with pytest.raises(ValueError, match="no part of a chain"):
        lay_group_out(replace(FIRST, **wrong))


def test_a_row_that_is_prompt_here_and_label_elsewhere_hands_over_its_head_output() -> None:
    layout = lay_group_out(FIRST, first_head=17)
    assert layout.handover[layout.handover_heads].tolist() == [17, 18]
    assert {17, 18} <= set(layout.head_rows.tolist())


def test_a_part_without_a_row_of_its_own_is_refused() -> None:
    def lay_out_one(num_carried: int) -> CarriedLayout:
        part = ChainPart(num_chain=1, num_carried=num_carried)
        rows = np.array([1, 2, 3, 4]), np.array([0, 4]), np.array([2])
        return build_carried_layout(*rows, part=part, first_head=1, forward_only=True)

    assert lay_out_one(2).num_rows == 1
    with pytest.raises(ValueError, match="own at least one row"):
        lay_out_one(3)
