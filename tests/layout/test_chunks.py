"""Split groups over random trees: a token is computed once, reads its ancestors and gets every pending gradient."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.chains import LaidOut, lay_out, num_of_group, plans, tries, walk_backward, walk_forward
from tests.layout.tries import Batch, Key, batch_of, batches
from verl_pg_plugin.layout import Chunk, PackedLayout, build_chunk_layout, idle_prefill

ANY_BATCH = st.one_of(tries(), batches(max_sequences=10), batches(max_sequences=10, with_classes=True))


def readable(layout: PackedLayout) -> list[list[int]]:
    """For every own token, the indices into [cached | own] that its query may see: causal, aligned at the end."""
    seen = []
    keys = [layout.kv_index[a:b].tolist() for a, b in pairwise(layout.cu_seqlens_k.tolist())]
    for path, (a, b) in zip(keys, pairwise(layout.cu_seqlens_q.tolist()), strict=True):
        seen.extend(path[: len(path) - (b - a) + i + 1] for i in range(b - a))
    return seen


def ancestors(key: tuple[int, Key]) -> list[tuple[int, Key]]:
    return [(key[0], key[1][: t + 2]) for t in range(len(key[1]) - 1)]


@given(st.data(), ANY_BATCH, st.booleans())
def test_every_token_is_computed_by_one_chunk_of_its_split_group(
    data: st.DataObject, batch: Batch, forward_only: bool
) -> None:
    for group in data.draw(plans(batch)):
        parts, rows = lay_out(batch, group, forward_only), group_keys(batch, group)
        owned = Counter(key for p in parts for key in p.own_keys if key in rows)
        assert owned == Counter(rows) + Counter(key for key in filler_keys(batch, group) if key in rows)
        for p in parts:
            assert p.layout.num_tokens == p.part.num_tokens == len(p.own_keys)
            assert p.layout.input_ids.tolist() == [key[-2] for _, key in p.own_keys]
            assert p.layout.labels.tolist() == [key[-1] for _, key in p.own_keys]
            assert p.layout.position_ids.tolist() == [len(key) - 2 for _, key in p.own_keys]
            assert p.layout.num_logical_tokens == sum(map(len, p.batch.sequences))


def group_keys(batch: Batch, group: list) -> set[tuple[int, Key]]:
    """Tokens of the split group's sequences; of an ordinary micro-batch, all."""
    return batch.take([s for part in group for s in part.sequences[: num_of_group(part) or None]]).rows()


def filler_keys(batch: Batch, group: list) -> list[tuple[int, Key]]:
    """Tokens of what fills chunks: it reads none of the others, so prefixes that it shares are computed again."""
    return [key for part in group if part.chunk for key in batch.take(part.sequences[num_of_group(part) :]).rows()]


@given(st.data(), ANY_BATCH)
def test_a_query_sees_its_ancestors_in_order_and_nothing_else(data: st.DataObject, batch: Batch) -> None:
    for group in data.draw(plans(batch)):
        for p in lay_out(batch, group, forward_only=False):
            seen = readable(p.layout)
            assert [[p.keys[row] for row in rows] for rows in seen] == [ancestors(key) for key in p.own_keys]
            for layout in filter(None, (p.layout, p.layout.prefill)):
                as_they_are = layout.kv_index.tolist() == list(range(layout.num_cached + layout.num_tokens))
                assert layout.num_gathered_kv == (0 if as_they_are else len(layout.kv_index))
            segment_rows = [len(seen[row]) - 1 for row in p.layout.cu_seqlens_q[:-1].tolist()]
            assert p.layout.segment_start.tolist() == segment_rows
            if (prefill := p.layout.prefill) is not None:
                assert not prefill.num_gathered_kv
                path = p.keys[: p.layout.num_cached]
                assert [[path[row] for row in rows] for rows in readable(prefill)] == [
                    ancestors(key) for key in path[p.part.chunk.num_kept :]
                ]


def test_a_chunk_that_begins_with_a_duplicate_gathers_the_cached_tokens_that_it_reads() -> None:
    batch = batch_of(*[(range(20), (1, 2, 3))] * 2, (range(20), (4, 5)))
    part = Chunk(num_sequences=2, num_cached=22, num_kept=19)
    mine, options = batch.take([1, 2]), {"first_label": 19, "forward_only": True}
    layout = build_chunk_layout(mine.tokens, mine.offsets, np.full(2, 20), chunk=part, **options)
    assert layout.kv_index.tolist() == [*range(19), 22, 23]
    assert layout.num_gathered_kv == 21


@given(st.data(), ANY_BATCH)
def test_a_segment_follows_its_parent_unless_that_is_cached(data: st.DataObject, batch: Batch) -> None:
    for group in data.draw(plans(batch)):
        for p in lay_out(batch, group, forward_only=True):
            layout, seen = p.layout, readable(p.layout)
            assert (np.diff(layout.cu_seqlens_q) > 0).all()
            for segment, parent in enumerate(layout.segment_parent.tolist()):
                before = seen[int(layout.cu_seqlens_q[segment])][:-1]
                if parent >= 0:
                    assert before[-1] - layout.num_cached == layout.cu_seqlens_q[parent + 1] - 1
                else:
                    assert not before or before[-1] < layout.num_cached
        roots = sum(p.layout.num_groups for p in lay_out(batch, group, forward_only=True))
        if all(len(part.sequences) == num_of_group(part) for part in group):
            assert roots == 1


@given(st.data(), ANY_BATCH)
def test_without_gradient_a_part_finds_on_the_stack_what_earlier_parts_left(data: st.DataObject, batch: Batch) -> None:
    def visit(p: LaidOut, cached: list) -> list:
        assert [key for key, _ in cached] == p.keys[: p.layout.num_cached]
        assert p.layout.prefill is None
        heads = set(p.layout.head_index.tolist())
        check_heads(p, [has_head for _, has_head in cached])
        return [(key, row in heads) for row, key in enumerate(p.own_keys)]

    for group in data.draw(plans(batch)):
        walk_forward(lay_out(batch, group, forward_only=True), visit)


def check_heads(p: LaidOut, cached_has_head: list[bool]) -> None:
    """Every response token is read from a token with its path and label that has been through the LM head."""
    layout = p.layout
    assert all(cached_has_head[position] for position in layout.cached_heads.tolist())
    read = [*layout.cached_heads.tolist(), *(layout.num_cached + layout.head_index).tolist()]
    logical = dict(zip(layout.response_index.tolist(), layout.response_head.tolist(), strict=True))
    expected = {
        int(p.batch.offsets[s]) + t: (p.batch.class_of(s), tokens[: t + 2])
        for s, tokens in enumerate(p.batch.sequences)
        for t in range(p.batch.prompt_lengths[s] - 1, len(tokens) - 1)
    }
    assert {index: p.keys[read[head]] for index, head in logical.items()} == expected
    for row, sequence in zip(layout.head_index.tolist(), layout.head_sequence.tolist(), strict=True):
        assert p.batch.sequences[sequence][: len(p.own_keys[row][1])] == p.own_keys[row][1]
        assert p.batch.class_of(sequence) == p.own_keys[row][0]


@given(st.data(), ANY_BATCH)
def test_a_prefill_computes_what_the_cache_lacks_with_the_head_outputs_it_needs(
    data: st.DataObject, batch: Batch
) -> None:
    def prefill(p: LaidOut, layout: PackedLayout, cached: list) -> list:
        path = p.keys[: p.layout.num_cached]
        assert [key for key, _ in cached] == path[: layout.num_cached]
        own = path[layout.num_cached :]
        assert layout.input_ids.tolist() == [key[-2] for _, key in own]
        assert layout.labels.tolist() == [key[-1] for _, key in own]
        assert layout.position_ids.tolist() == [len(key) - 2 for _, key in own]
        assert not len(layout.response_index)
        assert not len(layout.response_head)
        assert layout.publish[layout.publish_heads].tolist() == layout.head_index.tolist()
        assert len(layout.head_sequence) == len(layout.head_index)
        assert not layout.head_sequence.any()
        heads = set(layout.head_index.tolist())
        return [(key, row in heads) for row, key in enumerate(own)]

    def visit(p: LaidOut, cached: list, pending: list) -> list:
        assert [key for key, _ in cached] == p.keys[: p.layout.num_cached]
        check_heads(p, [has_head for _, has_head in cached])
        assert set(p.layout.publish[p.layout.publish_heads].tolist()) <= set(p.layout.head_index.tolist())
        return [0] * p.layout.num_cached

    for group in data.draw(plans(batch)):
        walk_backward(lay_out(batch, group, forward_only=False), prefill, visit)


@given(st.data(), ANY_BATCH)
def test_every_gradient_reaches_the_chunk_that_computes_the_token_exactly_once(
    data: st.DataObject, batch: Batch
) -> None:
    """Keys' gradients by (reader, row), and head outputs' by response token: counted, none lost, none twice."""
    for group in data.draw(plans(batch)):
        received: Counter = Counter()

        def prefill(p: LaidOut, layout: PackedLayout, cached: list) -> list:
            return list(p.keys[layout.num_cached : p.layout.num_cached])

        def visit(p: LaidOut, cached: list, pending: list, received: Counter = received) -> list:
            layout, c = p.layout, p.layout.num_cached
            sums = [Counter() for _ in p.keys]
            for query, rows in enumerate(readable(layout)):
                for row in rows:
                    sums[row][p.own_keys[query]] += 1
            heads = [*layout.cached_heads.tolist(), *(c + layout.head_index).tolist()]
            for index, head in zip(layout.response_index.tolist(), layout.response_head.tolist(), strict=True):
                s = int(np.searchsorted(p.batch.offsets, index, side="right")) - 1
                sums[heads[head]]["token", p.part.sequences[s], index - int(p.batch.offsets[s])] += 1
            for row, more in zip(layout.publish.tolist(), pending, strict=True):
                sums[c + row] += more
            for key, total in zip(p.own_keys, sums[c:], strict=True):
                received.update({(key, reader): times for reader, times in total.items()})
            return sums[:c]

        walk_backward(lay_out(batch, group, forward_only=False), prefill, visit, nothing=Counter())
        members = [(s, part) for part in group for s in part.sequences]
        expected = Counter(
            (row, ("token", s, len(row[1]) - 2))
            for s, _ in members
            for row in ancestors((batch.class_of(s), batch.sequences[s]))
            if len(row[1]) - 1 >= batch.prompt_lengths[s]
        )
        rows = [key for p in lay_out(batch, group, forward_only=False) for key in p.own_keys]
        expected.update((row, key) for key in rows for row in ancestors(key))
        assert received == expected


@given(batches())
def test_a_rank_without_a_prefill_runs_one_token_that_nobody_reads(batch: Batch) -> None:
    idle = idle_prefill(batch.tokens, batch.offsets)
    first = batch.sequences[0]
    assert (idle.input_ids.tolist(), idle.labels.tolist(), idle.position_ids.tolist()) == ([first[0]], [first[1]], [0])
    assert (idle.num_cached, idle.kv_index.tolist(), idle.is_chunk) == (0, [0], False)
    assert idle.num_logical_tokens == len(first)
    assert not len(idle.publish)
    assert not len(idle.publish_heads)
    assert not len(idle.response_head)


GROUP = batch_of(*[(range(20), (i, i, i)) for i in range(4)])
FIRST = Chunk(num_sequences=4, num_read_next=19)


def lay_group_out(part: Chunk, first_label: int = 19) -> PackedLayout:
    options = {"chunk": part, "first_label": first_label, "forward_only": True}
    return build_chunk_layout(GROUP.tokens, GROUP.offsets, np.full(4, 20), **options)


@pytest.mark.parametrize("wrong", [{"num_read_next": 25}, {"num_cached": 10}, {"num_cached": 40, "num_read_next": 0}])
def test_numbers_of_another_batch_are_refused(wrong: dict) -> None:
    assert lay_group_out(FIRST).num_tokens == 31
    with pytest.raises(ValueError, match="is no chunk"):
        lay_group_out(replace(FIRST, **wrong))


def test_a_token_that_is_prompt_here_and_label_elsewhere_publishes_its_head_output() -> None:
    layout = lay_group_out(FIRST, first_label=17)
    assert layout.publish[layout.publish_heads].tolist() == [17, 18]
    assert {17, 18} <= set(layout.head_index.tolist())
