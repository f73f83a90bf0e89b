"""Layouts over random trees: a token is computed once, reads its ancestors and gets every pending gradient."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.tries import (
    Batch,
    Key,
    LaidOut,
    batch_of,
    batches,
    lay_out,
    num_of_group,
    part_keys,
    plans,
    response_places,
    tries,
)
from verl_pg_plugin.layout import Chunk, PackedLayout, build_packed_layout

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


def check_tokens(layout: PackedLayout, own_keys: list[tuple[int, Key]]) -> None:
    assert layout.num_tokens == len(own_keys)
    assert layout.input_ids.tolist() == [key[-2] for _, key in own_keys]
    assert layout.labels.tolist() == [key[-1] for _, key in own_keys]
    assert layout.position_ids.tolist() == [len(key) - 2 for _, key in own_keys]
    as_they_are = layout.kv_index.tolist() == list(range(layout.num_cached + layout.num_tokens))
    assert layout.num_gathered_kv == (0 if as_they_are else len(layout.kv_index))


@given(st.data(), ANY_BATCH, st.booleans())
def test_every_token_is_computed_by_one_chunk_of_its_split_group_and_sees_its_ancestors(
    data: st.DataObject, batch: Batch, forward_only: bool
) -> None:
    at_least = data.draw(st.just(1) | st.integers(1, len(batch.sequences)))
    for group in data.draw(plans(batch, at_least=at_least)):
        parts, rows = lay_out(batch, group, forward_only), group_keys(batch, group)
        owned = Counter(key for p in parts for key in p.own_keys if key in rows)
        once = Counter(rows) + Counter(key for key in filler_keys(batch, group) if key in rows)
        # A chunk that only another rank's number asks for may compute again what it has no room to read.
        assert owned == once or (at_least > 1 and owned >= once)
        for p in parts:
            assert p.layout.num_tokens == p.part.num_tokens
            assert p.layout.num_logical_tokens == sum(map(len, p.batch.sequences))
            check_tokens(p.layout, p.own_keys)
            check_attends(p)
        if all(len(part.sequences) == num_of_group(part) for part in group):
            assert sum((p.layout.segment_start == 0).sum() for p in parts) == 1


def group_keys(batch: Batch, group: list) -> set[tuple[int, Key]]:
    """Tokens of the split group's sequences; of an ordinary micro-batch, all."""
    return batch.take([s for part in group for s in part.sequences[: num_of_group(part) or None]]).rows()


def filler_keys(batch: Batch, group: list) -> list[tuple[int, Key]]:
    """Tokens of what fills chunks: it reads none of the others, so prefixes that it shares are computed again."""
    return [key for part in group if part.chunk for key in batch.take(part.sequences[num_of_group(part) :]).rows()]


def check_attends(p: LaidOut) -> None:
    """A query sees its ancestors in order, and a segment follows its parent unless that is cached."""
    layout, seen = p.layout, readable(p.layout)
    assert [[p.keys[row] for row in rows] for rows in seen] == [ancestors(key) for key in p.own_keys]
    assert (np.diff(layout.cu_seqlens_q) > 0).all()
    for segment, parent in enumerate(layout.segment_parent.tolist()):
        before = seen[int(layout.cu_seqlens_q[segment])][:-1]
        assert layout.segment_start[segment] == len(before)
        if parent >= 0:
            assert before[-1] - layout.num_cached == layout.cu_seqlens_q[parent + 1] - 1
        else:
            assert not before or before[-1] < layout.num_cached


def test_a_chunk_that_begins_with_a_duplicate_gathers_the_cached_tokens_that_it_reads() -> None:
    batch = batch_of(*[(range(20), (1, 2, 3))] * 2, (range(20), (4, 5)))
    part = Chunk(num_sequences=2, num_cached=22, num_kept=19)
    mine, options = batch.take([1, 2]), {"first_label": 19, "forward_only": True}
    layout = build_packed_layout(mine.tokens, mine.offsets, np.full(2, 20), chunk=part, **options)
    assert layout.kv_index.tolist() == [*range(19), 22, 23]
    assert layout.num_gathered_kv == 21


def with_heads(layout: PackedLayout, own_keys: list[tuple[int, Key]]) -> list[tuple[tuple[int, Key], bool]]:
    """What a forward publishes, in the order of the path: tokens, and whether they have a head output."""
    heads = set(layout.head_index.tolist())
    return [(own_keys[row], row in heads) for row in layout.publish.tolist()]


def check_reads(p: LaidOut, cached: list[tuple[tuple[int, Key], bool]]) -> None:
    """Every cached token is there; every response token is read from one with its path, label and head output."""
    layout = p.layout
    assert [key for key, _ in cached] == p.keys[: layout.num_cached]
    assert all(cached[position][1] for position in layout.cached_heads.tolist())
    expected = {place: (p.batch.class_of(s), key) for place, (s, key) in response_places(p.batch).items()}
    assert {place: p.keys[row] for place, row in response_rows(layout)} == expected
    for row, sequence in zip(layout.head_index.tolist(), layout.head_sequence.tolist(), strict=True):
        assert p.batch.sequences[sequence][: len(p.own_keys[row][1])] == p.own_keys[row][1]
        assert p.batch.class_of(sequence) == p.own_keys[row][0]


def response_rows(layout: PackedLayout) -> list[tuple[int, int]]:
    """Of each response token its logical index and the index into [cached | own] that it is read from."""
    heads = [*layout.cached_heads.tolist(), *(layout.num_cached + layout.head_index).tolist()]
    places = zip(layout.response_index.tolist(), layout.response_head.tolist(), strict=True)
    return [(place, heads[head]) for place, head in places]


@given(st.data(), ANY_BATCH)
def test_without_gradient_a_chunk_finds_in_the_cache_what_earlier_chunks_left(
    data: st.DataObject, batch: Batch
) -> None:
    for group in data.draw(plans(batch)):
        cache: list[tuple[tuple[int, Key], bool]] = []
        for p in lay_out(batch, group, forward_only=True):
            assert p.layout.prefill is None
            check_reads(p, cache[: p.layout.num_cached])
            assert p.layout.publish_start <= len(cache)
            cache[p.layout.publish_start :] = with_heads(p.layout, p.own_keys)
        assert not cache, "nothing stays allocated"


@given(st.data(), ANY_BATCH)
def test_prefills_fill_the_cache_and_every_gradient_reaches_the_chunk_that_computes_the_token_exactly_once(
    data: st.DataObject, batch: Batch
) -> None:
    """Keys' gradients by (reader, row), and head outputs' by response token: counted, none lost, none twice."""
    for group in data.draw(plans(batch)):
        laid_out = lay_out(batch, group, forward_only=False)
        received: Counter = Counter()
        cache: list[tuple[tuple[int, Key], bool]] = []
        pending: list[Counter] = []
        for p in laid_out[::-1]:
            layout, c = p.layout, p.layout.num_cached
            consumed = pending[layout.publish_start :]
            del cache[layout.publish_start :], pending[layout.publish_start :]
            if (prefill := layout.prefill) is not None:
                assert prefill.num_cached == prefill.publish_start == len(cache)
                own = p.keys[len(cache) : c]
                check_tokens(prefill, own)
                assert [[p.keys[row] for row in rows] for rows in readable(prefill)] == [ancestors(key) for key in own]
                assert not len(prefill.response_index)
                assert not len(prefill.response_head)
                assert prefill.head_sequence.tolist() == [0] * len(prefill.head_index)
                cache.extend(with_heads(prefill, own))
                pending.extend(Counter() for _ in own)
            check_reads(p, cache)
            sums = [Counter() for _ in p.keys]
            for reader, rows in zip(p.own_keys, readable(layout), strict=True):
                for row in rows:
                    sums[row][reader] += 1
            for place, row in response_rows(layout):
                s = int(np.searchsorted(p.batch.offsets, place, side="right")) - 1
                sums[row]["token", p.part.sequences[s], place - int(p.batch.offsets[s])] += 1
            for row, more in zip(layout.publish.tolist(), consumed, strict=True):
                sums[c + row] += more
            for key, total in zip(p.own_keys, sums[c:], strict=True):
                received.update({(key, reader): times for reader, times in total.items()})
            for position, more in enumerate(sums[:c]):
                pending[position] += more
        assert not cache, "every sum has found its owner"
        keys = [key for p in laid_out for key in p.own_keys]
        expected = Counter((row, key) for key in keys for row in ancestors(key))
        for s in (s for part in group for s in part.sequences):
            labelled = range(batch.prompt_lengths[s] - 1, len(batch.sequences[s]) - 1)
            row_of = ancestors((batch.class_of(s), batch.sequences[s]))
            expected.update((row_of[t], ("token", s, t)) for t in labelled)
        assert received == expected


@given(st.data(), tries(), st.booleans())
def test_states_are_published_where_later_chunks_go_on_and_nowhere_else(
    data: st.DataObject, batch: Batch, forward_only: bool
) -> None:
    """In the order in which the engine runs chunks: in reverse with a gradient."""
    for group in data.draw(plans(batch)):
        layouts = [p.layout for p in lay_out(batch, group, forward_only)]
        cached: list[int] = []
        read: set[int] = set()
        for layout in layouts if forward_only else layouts[::-1]:
            if not forward_only:
                owned = [at for at in cached if at > layout.publish_start]
                assert owned == layout.published_states.tolist(), "each takes the gradients of what it computes"
                assert read.issuperset(owned)
                cached, read = [at for at in cached if at <= layout.publish_start], read.difference(owned)
            if (prefill := layout.prefill) is not None:
                assert set(prefill.resumed_at.tolist()) <= set(cached)
                read.update(prefill.resumed_at.tolist())
                cached += prefill.published_states.tolist()
            reads, behind = set(layout.resumed_at.tolist()), [at for at in cached if at <= layout.num_cached]
            assert reads <= set(behind)
            assert layout.num_states == len(behind)
            read.update(reads)
            if forward_only:
                cached = [at for at in cached if at <= layout.publish_start] + layout.published_states.tolist()
        assert forward_only or not cached


@given(batches())
def test_a_rank_without_a_prefill_runs_one_token_that_nobody_reads(batch: Batch) -> None:
    idle = batch.as_numbers.lay_out_idle_prefill()
    first = batch.sequences[0]
    assert (idle.input_ids.tolist(), idle.labels.tolist(), idle.position_ids.tolist()) == ([first[0]], [first[1]], [0])
    assert (idle.num_cached, idle.kv_index.tolist(), idle.is_chunk) == (0, [0], False)
    assert idle.num_logical_tokens == len(first)
    assert not len(idle.publish) + len(idle.response_head)


GROUP = batch_of(*[(range(20), (i, i, i)) for i in range(4)])
FIRST = Chunk(num_sequences=4, num_read_next=19)


def lay_group_out(part: Chunk, first_label: int = 19) -> PackedLayout:
    options = {"chunk": part, "first_label": first_label, "forward_only": True}
    return build_packed_layout(GROUP.tokens, GROUP.offsets, np.full(4, 20), **options)


@pytest.mark.parametrize("wrong", [{"num_read_next": 25}, {"num_cached": 10}, {"num_cached": 40, "num_read_next": 0}])
def test_numbers_of_another_batch_are_refused(wrong: dict) -> None:
    assert lay_group_out(FIRST).num_tokens == 31
    with pytest.raises(ValueError, match="is no chunk"):
        lay_group_out(replace(FIRST, **wrong))


def test_a_token_that_is_prompt_here_and_label_elsewhere_publishes_its_head_output() -> None:
    layout = lay_group_out(FIRST, first_label=17)
    assert {17, 18} <= set(layout.publish.tolist()) & set(layout.head_index.tolist())


@given(batches(with_classes=True))
def test_every_token_is_computed_once_and_segments_end_only_where_sequences_part(batch: Batch) -> None:
    """Sequences of different temperature never share a token."""
    layout, whole = batch.layout(), LaidOut(None, batch, batch.layout(), part_keys(batch, 0))
    keys = batch.rows()
    assert len(whole.keys) == len(keys)
    assert set(whole.keys) == keys
    check_tokens(layout, whole.keys)
    check_attends(whole)
    check_reads(whole, [])
    assert layout.num_logical_tokens == sum(map(len, batch.sequences))
    assert layout.shares_tokens == (len(keys) < sum(len(sequence) - 1 for sequence in batch.sequences))
    assert not layout.is_chunk
    children = Counter(layout.segment_parent.tolist())
    roots = len({(c, key) for c, key in keys if len(key) == 2})
    assert (layout.segment_start == 0).sum() == children.pop(-1) == roots
    assert all(count > 1 for count in children.values())
    assert (np.diff(layout.head_index) > 0).all()
    assert set(layout.response_head.tolist()) == set(range(len(layout.head_index))), "the head runs nowhere else"


@given(batches(), st.data())
def test_the_order_of_the_batch_changes_nothing_but_where_results_go(batch: Batch, data: st.DataObject) -> None:
    one, other = batch.layout(), batch.take(data.draw(st.permutations(range(len(batch.sequences))))).layout()
    for name in ("input_ids", "labels", "cu_seqlens_q", "cu_seqlens_k", "kv_index", "segment_parent"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("tokens", "prompt_lengths", "message"),
    [
        (range(6), [2, 0], "sequence 1 has an empty prompt"),
        (range(6), [2, 3], "sequence 1 has an empty response"),
        *[
            ([1, 2, 3, 4, 5, token], [1, 1], r"token ids must lie in \[0, 2\*\*32\), got")
            for token in (-100, -1, 2**32)
        ],
    ],
)
def test_sequences_that_are_none_are_refused(tokens: list[int], prompt_lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_packed_layout(np.array(tokens), np.array([0, 3, 6]), np.array(prompt_lengths))
