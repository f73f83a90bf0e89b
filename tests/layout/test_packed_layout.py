"""Properties of the layout over random tries: nothing is lost, nothing is computed twice, nothing leaks."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.tries import Batch, batches, row_keys, row_paths, segment_paths, segment_tokens
from verl_pg_plugin.layout import build_packed_layout
from verl_pg_plugin.planning.cost import num_pairs


@given(batches(with_classes=True))
def test_every_distinct_row_is_computed_exactly_once(batch: Batch) -> None:
    layout = batch.layout()
    assert layout.num_tokens == len(batch.rows())
    assert Counter(row_keys(layout)) == Counter(key for _, key in batch.rows())
    assert layout.num_logical_tokens == sum(map(len, batch.sequences))


@given(batches())
def test_every_sequence_is_reconstructed_from_its_rows(batch: Batch) -> None:
    layout = batch.layout()
    paths = dict(zip(row_keys(layout), row_paths(layout), strict=True))
    for sequence in batch.sequences:
        path = paths[sequence]  # key of its last row: all tokens before, then the last token as its label
        assert layout.input_ids[path].tolist() == list(sequence[:-1])
        assert layout.labels[path].tolist() == list(sequence[1:])
        assert layout.position_ids[path].tolist() == list(range(len(sequence) - 1))


@given(batches(with_classes=True))
def test_a_segment_attends_to_its_own_path_and_never_to_a_sibling(batch: Batch) -> None:
    layout = batch.layout()
    bounds = pairwise(layout.cu_seqlens_k.tolist())
    assert [layout.kv_index[start:stop].tolist() for start, stop in bounds] == segment_paths(layout)
    assert layout.cu_seqlens_k[-1] == len(layout.kv_index)


@given(batches(with_classes=True))
def test_segments_tile_the_rows_with_parents_before_children(batch: Batch) -> None:
    layout = batch.layout()
    num_own = np.diff(layout.cu_seqlens_q)
    assert (layout.cu_seqlens_q[0], layout.cu_seqlens_q[-1]) == (0, layout.num_tokens)
    assert (num_own > 0).all()
    assert (layout.segment_parent < np.arange(len(num_own))).all()
    assert layout.segment_start.tolist() == [
        len(path) - own for path, own in zip(segment_paths(layout), num_own.tolist(), strict=True)
    ]
    assert layout.max_seqlen_q == num_own.max()
    assert layout.max_seqlen_k == max(map(len, segment_paths(layout)))


@given(batches(with_classes=True))
def test_segments_end_only_where_sequences_part(batch: Batch) -> None:
    """A needless cut would copy keys and values for nothing."""
    layout = batch.layout()
    children = Counter(layout.segment_parent.tolist())
    assert layout.num_groups == len({(c, key) for c, key in batch.rows() if len(key) == 2}) == children.pop(-1)
    assert all(count > 1 for count in children.values())


@given(batches(with_classes=True))
def test_keys_are_copied_only_where_two_segments_read_a_row(batch: Batch) -> None:
    layout = batch.layout()
    read_twice = max(Counter(layout.kv_index.tolist()).values()) > 1
    assert layout.num_gathered_kv == (len(layout.kv_index) if read_twice else 0)
    assert read_twice or layout.kv_index.tolist() == list(range(layout.num_tokens))
    rows_alone = sum(len(sequence) - 1 for sequence in batch.sequences)
    assert layout.shares_tokens == (len(batch.rows()) < rows_alone)


@given(batches(with_classes=True))
def test_the_head_runs_on_exactly_the_rows_that_predict_a_response_token(batch: Batch) -> None:
    layout = batch.layout()
    keys = row_keys(layout)
    assert Counter(keys[row] for row in layout.head_index) == Counter(key for _, key in batch.response_rows())
    assert (np.diff(layout.head_index) > 0).all()


@given(batches(with_classes=True))
def test_every_response_token_is_read_from_the_row_with_its_path_and_label(batch: Batch) -> None:
    layout = batch.layout()
    keys = row_keys(layout)
    row_at = dict(zip(layout.response_index.tolist(), layout.head_index[layout.response_head].tolist(), strict=True))
    expected = {
        int(batch.offsets[s]) + t: tokens[: t + 2]
        for s, tokens in enumerate(batch.sequences)
        for t in range(batch.prompt_lengths[s] - 1, len(tokens) - 1)
    }
    assert len(layout.response_index) == len(expected)
    assert {index: keys[row] for index, row in row_at.items()} == expected


@given(batches(with_classes=True))
def test_a_head_row_takes_its_temperature_from_a_sequence_that_contains_it(batch: Batch) -> None:
    layout = batch.layout()
    keys = row_keys(layout)
    for row, sequence in zip(layout.head_index.tolist(), layout.head_sequence.tolist(), strict=True):
        assert batch.sequences[sequence][: len(keys[row])] == keys[row]
    # and so do all response tokens that read the row
    sequence_of = np.searchsorted(batch.offsets, layout.response_index, side="right") - 1
    for sequence, head in zip(sequence_of.tolist(), layout.response_head.tolist(), strict=True):
        assert batch.class_of(sequence) == batch.class_of(int(layout.head_sequence[head]))


@given(batches(with_classes=True))
def test_sequences_of_different_temperature_never_share_a_row(batch: Batch) -> None:
    layout = batch.layout()
    paths = row_paths(layout)
    sequence_of = np.searchsorted(batch.offsets, layout.response_index, side="right") - 1
    class_of_row: dict[int, int] = {}
    for sequence, row in zip(sequence_of.tolist(), layout.head_index[layout.response_head].tolist(), strict=True):
        for visible in paths[row]:
            assert class_of_row.setdefault(visible, batch.class_of(sequence)) == batch.class_of(sequence)


@given(batches(), st.data())
def test_the_order_of_the_batch_changes_nothing_but_where_results_go(batch: Batch, data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(len(batch.sequences))))
    one, other = batch.layout(), batch.take(rows).layout()
    assert Counter(row_keys(one)) == Counter(row_keys(other))
    assert segment_tokens(one) == segment_tokens(other)


@given(batches(with_classes=True))
def test_reported_attention_flops_equal_a_count_of_visible_pairs(batch: Batch) -> None:
    layout = batch.layout()
    assert num_pairs(layout) == sum(map(len, row_paths(layout)))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_token_ids_of_every_width_give_the_same_rows(dtype: type) -> None:
    tokens, offsets = np.array([7, 255, 256, 1, 7, 255, 65536, 2]), np.array([0, 4, 8])
    layout = build_packed_layout(tokens.astype(dtype), offsets, np.array([2, 2]))
    assert Counter(row_keys(layout)) == Counter(
        [(7, 255), (7, 255, 256), (7, 255, 256, 1), (7, 255, 65536), (7, 255, 65536, 2)]
    )
