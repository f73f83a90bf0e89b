"""Prefix order and layouts of random trees: a token is computed once, sees its ancestors and gets every gradient."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.tries import Batch, Key, LaidOut, batch_of, batches, lay_out, num_of_group, plans, tries
from verl_pg_plugin.layout import Chunk, IntArray, PackedLayout, Sequences, build_packed_layout, build_prefix_order
from verl_pg_plugin.layout.padded import build_padded_layout


def test_tokens_are_sorted_as_numbers_not_bytes() -> None:
    """Ranks with another byte order would cut the same batch differently."""
    tokens = np.array([256, 1, 0, 1, 1, 0, 65536, 1, 0, 255, 1, 0])
    for dtype in (np.int32, np.int64, np.uint32):
        assert build_prefix_order(tokens.astype(dtype), np.arange(0, 13, 3)).sequences.tolist() == [1, 3, 0, 2]


PART = st.one_of(st.integers(0, 2), st.integers(10, 11))  # a token of text, or an image of three tokens
SEQUENCES = st.lists(
    st.tuples(st.lists(PART, min_size=1, max_size=6), st.integers(0, 2)).map(lambda parts: [*parts[0], parts[1]]),
    min_size=1,
    max_size=8,
)


def laid_out(sequences: list[list[int]]) -> tuple[IntArray, IntArray, IntArray]:
    """Return keys, offsets and the offset of each token inside its image."""
    keys = [[key for part in parts for key in [part] * (3 if part >= 10 else 1)] for parts in sequences]
    offset_in_image = [[k for part in parts for k in range(3 if part >= 10 else 1)] for parts in sequences]
    return np.concatenate(keys), np.cumsum([0, *map(len, keys)]), np.concatenate(offset_in_image)


@given(SEQUENCES)
def test_images_stay_whole_and_text_is_shared_as_before(sequences) -> None:
    keys, offsets, offset_in_image = laid_out(sequences)
    broken, whole = build_prefix_order(keys, offsets), build_prefix_order(keys, offsets, None, offset_in_image)
    assert (offset_in_image[offsets[whole.sequences] + whole.num_shared] == 0).all()
    lost = broken.num_shared - whole.num_shared
    assert (lost == offset_in_image[offsets[broken.sequences] + broken.num_shared]).all()
    layout = build_packed_layout(keys, offsets, np.ones(len(sequences), dtype=np.int64), None, offset_in_image)
    assert (keys[layout.token_index] == layout.input_ids).all()
    assert (keys[layout.token_index + 1] == layout.labels).all()
    steps = offset_in_image[layout.token_index]
    starts = np.flatnonzero((steps == 0) & (layout.input_ids >= 10))
    assert len(starts) * 3 == (layout.input_ids >= 10).sum()
    for start in starts.tolist():
        assert steps[start : start + 3].tolist() == [0, 1, 2]
        assert (np.diff(layout.token_index[start : start + 3]) == 1).all()


@pytest.mark.parametrize(("parts", "computed"), [([1, 2], 1), ([1, 10, 2], 1), ([10, 1, 2], 3)])
def test_idle_prefills_run_one_token_or_image(parts: list[int], computed: int) -> None:
    keys, offsets, inside = laid_out([parts, [0, 1]])
    sequences = Sequences(keys, offsets, np.ones(2, dtype=np.int64), offset_in_image=inside if inside.any() else None)
    idle, own = sequences.build_idle_prefill(), list(range(computed))
    assert (idle.input_ids.tolist(), idle.labels.tolist()) == (keys[own].tolist(), keys[1:][own].tolist())
    assert (idle.position_ids.tolist(), idle.kv_index.tolist(), idle.num_cached, idle.is_chunk) == (own, own, 0, False)
    assert idle.num_total_tokens == offsets[1]
    assert not len(idle.publish) + len(idle.response_head)


def test_batches_without_two_tokens_compute_one() -> None:
    alone = batch_of(((5,), ()), ((6,), ())).as_numbers
    first = batch_of(((5,), ()), ((6, 7), (8,))).as_numbers
    prefills = [(sequences.build_idle_prefill(), 1) for sequences in (alone, first)]
    for idle, num_logical in ((alone.build_layout(), 2), *prefills):
        assert (idle.input_ids.tolist(), idle.position_ids.tolist(), idle.token_index.tolist()) == ([5], [0], [0])
        assert (idle.num_total_tokens, idle.shares_tokens, idle.is_chunk) == (num_logical, False, False)
        assert not len(idle.head_index) + len(idle.response_index)
    assert first.build_layout().num_tokens == 2


ANY_BATCH = st.one_of(tries(), batches(max_sequences=10), batches(max_sequences=10, with_classes=True))


def readable(layout: PackedLayout) -> list[list[int]]:
    """For every own token, the indices into [cached | own] that its query may see: causal, aligned at the end."""
    keys = [layout.kv_index[a:b].tolist() for a, b in pairwise(layout.cu_seqlens_k.tolist())]
    seen = []
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


@given(st.data(), ANY_BATCH, st.booleans())
def test_chunks_compute_each_token_once_and_see_its_ancestors(data, batch, forward_only) -> None:
    at_least = data.draw(st.just(1) | st.integers(1, len(batch.sequences)))
    for group in data.draw(plans(batch, at_least=at_least)):
        parts = lay_out(batch, group, forward_only)
        # Of the split group's sequences; of an ordinary micro-batch, all.
        rows = batch.take([s for part in group for s in part.sequences[: num_of_group(part) or None]]).rows()
        # Fillers of chunks read no cached tokens, so prefixes that they share are computed again.
        fillers = [batch.take(part.sequences[num_of_group(part) :]) for part in group if part.chunk]
        owned = Counter(key for p in parts for key in p.own_keys if key in rows)
        once = Counter(rows) + Counter(key for filler in fillers for key in filler.rows() & rows)
        # A chunk that exists only to match another rank may recompute what it has no room to read.
        assert owned == once or (at_least > 1 and owned >= once)
        for p in parts:
            assert p.layout.num_tokens == p.part.num_tokens
            assert p.layout.num_total_tokens == sum(map(len, p.batch.sequences))
            check_tokens(p.layout, p.own_keys)
            check_attends(p)
        if all(len(part.sequences) == num_of_group(part) for part in group):
            assert sum((p.layout.segment_start == 0).sum() for p in parts) == 1


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


def with_heads(layout: PackedLayout, own_keys: list[tuple[int, Key]]) -> list[tuple[tuple[int, Key], bool]]:
    """Return the tokens that a forward publishes, in path order, and whether each has a head output."""
    heads = set(layout.head_index.tolist())
    return [(own_keys[row], row in heads) for row in layout.publish.tolist()]


def check_reads(p: LaidOut, cached: list[tuple[tuple[int, Key], bool]]) -> None:
    """Check that all cached tokens exist and each response token reads one of its path, label and head output."""
    layout = p.layout
    assert [key for key, _ in cached] == p.keys[: layout.num_cached]
    assert all(cached[position][1] for position in layout.cached_heads.tolist())
    expected = {
        int(p.batch.offsets[s]) + t: (p.batch.class_of(s), tokens[: t + 2])
        for s, tokens in enumerate(p.batch.sequences)
        for t in range(p.batch.prompt_lengths[s] - 1, len(tokens) - 1)
    }
    assert {place: p.keys[row] for place, row in response_rows(layout)} == expected
    in_sequence = np.searchsorted(p.batch.offsets, layout.token_index[layout.head_index], side="right") - 1
    for row, sequence in zip(layout.head_index.tolist(), in_sequence.tolist(), strict=True):
        assert p.batch.sequences[sequence][: len(p.own_keys[row][1])] == p.own_keys[row][1]
        assert p.batch.class_of(sequence) == p.own_keys[row][0]


def response_rows(layout: PackedLayout) -> list[tuple[int, int]]:
    """Return the logical index of each response token and the index into [cached | own] that it reads."""
    heads = [*layout.cached_heads.tolist(), *(layout.num_cached + layout.head_index).tolist()]
    places = zip(layout.response_index.tolist(), layout.response_head.tolist(), strict=True)
    return [(place, heads[head]) for place, head in places]


@given(st.data(), ANY_BATCH)
def test_forward_chunks_read_what_earlier_chunks_cached(data, batch) -> None:
    for group in data.draw(plans(batch)):
        cache: list[tuple[tuple[int, Key], bool]] = []
        for p in lay_out(batch, group, forward_only=True):
            assert p.layout.prefill is None
            check_reads(p, cache[: p.layout.num_cached])
            assert p.layout.publish_start <= len(cache)
            cache[p.layout.publish_start :] = with_heads(p.layout, p.own_keys)
        assert not cache, "nothing stays allocated"


@given(st.data(), ANY_BATCH)
def test_prefills_fill_the_cache_and_gradients_reach_the_owner_once(data, batch) -> None:
    """Count gradients of keys by (reader, token) and of head outputs by response token."""
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
                assert not len(prefill.response_index) + len(prefill.response_head)
                assert prefill.token_index.tolist() == list(range(prefill.num_cached, c))
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
        assert not cache, "every sum reached its owner"
        keys = [key for p in laid_out for key in p.own_keys]
        expected = Counter((row, key) for key in keys for row in ancestors(key))
        for s in (s for part in group for s in part.sequences):
            labelled = range(batch.prompt_lengths[s] - 1, len(batch.sequences[s]) - 1)
            row_of = ancestors((batch.class_of(s), batch.sequences[s]))
            expected.update((row_of[t], ("token", s, t)) for t in labelled)
        assert received == expected


@given(st.data(), tries(), st.booleans())
def test_states_are_published_only_where_later_chunks_resume(data, batch, forward_only) -> None:
    """In the order in which the engine runs chunks: reversed with gradients."""
    for group in data.draw(plans(batch)):
        layouts = [p.layout for p in lay_out(batch, group, forward_only)]
        cached: list[int] = []
        read: set[int] = set()
        for layout in layouts if forward_only else layouts[::-1]:
            if not forward_only:
                owned = [at for at in cached if at > layout.publish_start]
                assert owned == layout.published_states.tolist(), "a chunk takes the gradients of states it computes"
                assert read.issuperset(owned)
                cached, read = [at for at in cached if at <= layout.publish_start], read.difference(owned)
            if (prefill := layout.prefill) is not None:
                assert set(prefill.resumed_at.tolist()) <= set(cached)
                read.update(prefill.resumed_at.tolist())
                cached += prefill.published_states.tolist()
            reads, usable = set(layout.resumed_at.tolist()), [at for at in cached if at <= layout.num_cached]
            assert reads <= set(usable)
            assert layout.num_states == len(usable)
            use = len(layout.publish), len(layout.published_states), layout.num_cached, len(usable)
            assert layout.cache_use == dict(zip(("pending", "pending_states", "cached", "states"), use, strict=True))
            read.update(reads)
            if forward_only:
                cached = [at for at in cached if at <= layout.publish_start] + layout.published_states.tolist()
        assert forward_only or not cached


GROUP = batch_of(*[(range(20), (i, i, i)) for i in range(4)])
FIRST = Chunk(num_sequences=4, num_read_next=19)


@pytest.mark.parametrize("wrong", [{"num_read_next": 25}, {"num_cached": 10}, {"num_cached": 31, "num_read_next": 0}])
def test_chunks_of_another_batch_are_refused(wrong: dict) -> None:
    layout = GROUP.as_numbers.build_layout(FIRST, first_label=19)
    assert (layout.num_tokens, layout.head_index.min()) == (31, 19), "a published prompt runs no head"
    prefill = GROUP.as_numbers.build_layout(Chunk(num_sequences=4, num_cached=19), 19, forward_only=False).prefill
    assert (prefill.num_tokens, len(prefill.head_index)) == (19, 0), "nor does a prefilled one"
    with pytest.raises(ValueError, match="is no chunk"):
        GROUP.as_numbers.build_layout(replace(FIRST, **wrong), first_label=19)


@given(batches(with_classes=True))
def test_segments_end_at_forks_and_the_head_runs_at_labels_only(batch: Batch) -> None:
    """Sequences of different temperature never share a token."""
    layout, keys = batch.layout(), batch.rows()
    assert layout.shares_tokens == (len(keys) < sum(len(sequence) - 1 for sequence in batch.sequences))
    assert not layout.is_chunk
    children = Counter(layout.segment_parent.tolist())
    roots = len({(c, key) for c, key in keys if len(key) == 2})
    assert (layout.segment_start == 0).sum() == children.pop(-1) == roots
    assert all(count > 1 for count in children.values())
    assert (np.diff(layout.head_index) > 0).all()
    assert set(layout.response_head.tolist()) == set(range(len(layout.head_index))), "the head runs nowhere else"


def test_separate_responses_do_not_share_the_last_id_of_a_prompt() -> None:
    apart = batch_of(((1,), (5, 6)), ((1, 9), (7,))).as_numbers.responses_apart()
    assert apart.order().num_shared.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("tokens", "prompt_lengths", "message"),
    [
        (range(6), [2, 0], "sequence 1 has an empty prompt"),
        *[([1, 2, 3, 4, 5, token], [1, 1], r"ids must be in \[0, 2\*\*32\), got") for token in (-100, -1, 2**32)],
    ],
)
def test_invalid_sequences_are_refused(tokens: list[int], prompt_lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_packed_layout(np.array(tokens), np.array([0, 3, 6]), np.array(prompt_lengths))


def test_padded_groups_are_upstreams_rows() -> None:
    """A row has the prompt once, then every response after the prompt's last token."""
    batch = batch_of(((1, 2, 3), (7, 8)), ((4, 5), (6,)), ((1, 2, 3), (9,)), ((1, 4, 3), (7,)))
    layout = build_padded_layout(batch.tokens, batch.offsets, np.array(batch.prompt_lengths))
    assert layout.group_info == [[2, 2, 1], [1, 1], [2, 1]]
    assert layout.input_ids.tolist() == [[1, 2, 3, 7, 3], [4, 5, 0, 0, 0], [1, 4, 3, 0, 0]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 2], [0, 1, 0, 0, 0], [0, 1, 2, 0, 0]]
    assert layout.labels.tolist() == [[2, 3, 7, 8, 9], [5, 6, 0, 0, 0], [4, 3, 7, 0, 0]]
    assert layout.head_index.tolist() == [2, 3, 4, 6, 12]
    assert layout.response_index.tolist() == [2, 3, 10, 6, 14]
    assert layout.response_head.tolist() == [0, 1, 2, 3, 4]
    assert (layout.num_tokens, layout.num_total_tokens) == (15, 16)
    assert [x.tolist() for x in layout.segments] == [[0, 2, 2, 0, 1, 0, 2], [2, 2, 1, 1, 1, 2, 1]]
