"""`pack_grouped_data`, `create_pack_group` and `pad_sequence_to_length` against plain loops."""

from typing import Any

import numpy as np
import pytest
from benchmarks.packing_reference import group_by_loop, pack_by_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pg_plugin.packing import create_pack_group, pack_grouped_data, pad_sequence_to_length

EOS = 7


def make_sample(seq: int, first: int, last: int, seed: int = 0) -> dict[str, Any]:
    """One sample as `pack_grouped_data` takes it; what lies outside `first..last` must not be copied."""
    rng = np.random.default_rng(seed)
    return {
        "prompt_completion_ids": rng.integers(0, 150_000, seq),
        "prompt_mask": np.ones(seq, dtype=np.int64),
        "response_mask": rng.integers(0, 2, seq),
        "advantage": float(rng.standard_normal()),
        "prompt_start_idx": first,
        "response_end_index": last,
    }


@st.composite
def sample_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    samples = []
    for _ in range(draw(st.integers(1, 7))):
        seq = draw(st.integers(1, 20))
        first = draw(st.integers(0, seq - 1))
        samples.append(make_sample(seq, first, draw(st.integers(first, seq - 1)), seed=draw(st.integers(0, 99))))
    return samples


def assert_rows_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


@settings(max_examples=100, deadline=None)
@given(sample_lists(), st.integers(0, 3), st.integers(0, 30))
def test_equals_the_loop_for_any_samples(samples: list[dict[str, Any]], num_dummies: int, slack: int) -> None:
    pack_num = len(samples) + num_dummies
    needed = sum(sample["response_end_index"] - sample["prompt_start_idx"] + 2 for sample in samples) + num_dummies
    row = {"seq_length": needed + slack, "pad_token_id": EOS}
    assert_rows_equal(pack_grouped_data(samples, pack_num, **row), pack_by_sample(samples, pack_num, **row))


def test_one_row_written_out_by_hand_with_the_dtypes_that_callers_were_told() -> None:
    """The pad token is a token too."""
    names = ("prompt_completion_ids", "response_mask", "advantage", "prompt_start_idx", "response_end_index")
    written = (([0, 11, EOS, 13], [0, 0, 1, 1], 0.5, 1, 3), ([21, 22, 0, 0], [0, 1, 0, 0], -2.0, 0, 1))
    samples = [dict(zip(names, sample, strict=True)) for sample in written]
    samples[0]["prompt_completion_ids"] = np.array(written[0][0], dtype=np.int32)
    samples[0]["response_mask"] = np.array(written[0][1], dtype=bool)
    row = pack_grouped_data(samples, pack_num=4, seq_length=11, pad_token_id=EOS)
    # Sample, EOS, sample, EOS, two of padding, two dummies.
    assert row["prompt_completion_ids"].tolist() == [11, EOS, 13, EOS, 21, 22, EOS, EOS, EOS, EOS, EOS]
    assert row["responses_mask"].tolist() == [0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0]
    assert row["advantages"].tolist() == [0.5, 0.5, 0.5, 0.5, -2, -2, -2, 0, 0, 0, 0]
    assert row["sample_index"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 3]
    assert row["actual_sequence_length"].tolist() == [4, 9, 10, 11]
    assert row["sample_valid_length"].tolist() == [2, 1, 1, 1]
    assert row.pop("advantages").dtype == np.float64
    assert {column.dtype for column in row.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("change", "num_samples", "pack_num", "seq_length", "message"),
    [
        ({}, 1, 1, 6, "seq_length to at least 7"),
        ({}, 1, 3, 8, "seq_length to at least 9"),
        ({}, 1, 0, 20, "pack_num"),
        ({"response_end_index": 6}, 1, 1, 20, "inside"),
        ({"prompt_start_idx": -1}, 1, 1, 20, "inside"),
        ({"prompt_start_idx": 5, "response_end_index": 4}, 1, 1, 20, "no tokens"),
        ({"response_mask": np.ones(5, dtype=np.int64)}, 1, 1, 20, "equally long"),
        ({"prompt_completion_ids": np.ones((6, 1), dtype=np.int64)}, 1, 1, 20, "1-D"),
        ({}, 0, 2, 50, "got 0"),
        ({}, 3, 2, 50, "got 3"),
        ({}, 3, 3, 20, "needs 21 tokens"),
    ],
)
def test_samples_that_cannot_be_packed_are_refused(
    change: dict[str, Any], num_samples: int, pack_num: int, seq_length: int, message: str
) -> None:
    samples = [make_sample(6, 0, 5) | change] * num_samples
    with pytest.raises(ValueError, match=message):
        pack_grouped_data(samples, pack_num, seq_length=seq_length, pad_token_id=EOS)


@settings(max_examples=100, deadline=None)
@given(sample_lists(), st.integers(1, 5), st.integers(0, 40))
def test_packs_are_those_of_the_greedy_loop(samples: list[dict[str, Any]], pack_num: int, slack: int) -> None:
    longest = max(sample["response_end_index"] - sample["prompt_start_idx"] + 1 for sample in samples)
    seq_length = longest + pack_num + slack
    actual = create_pack_group(samples, pack_num, seq_length)
    expected = group_by_loop(samples, pack_num, seq_length)
    assert [[id(sample) for sample in pack] for pack in actual] == [[id(s) for s in pack] for pack in expected]


def test_no_samples_give_no_packs_and_one_that_fits_no_row_is_named() -> None:
    assert create_pack_group([], 2, 10) == []
    with pytest.raises(ValueError, match="sample 0 has 6 tokens"):
        create_pack_group([make_sample(6, 0, 5)], 2, 7)


@given(st.lists(st.integers(-5, 5), max_size=8), st.integers(0, 6), st.integers(-9, 9))
def test_padding_appends_and_keeps_the_dtype(values: list[int], extra: int, pad_value: int) -> None:
    sequence = np.array(values, dtype=np.int32)
    padded = pad_sequence_to_length(sequence, len(values) + extra, pad_value)
    assert padded.tolist() == values + [pad_value] * extra
    assert padded.dtype == np.int32


@pytest.mark.parametrize(("sequence", "message"), [([1, 2, 3], "lose tokens"), ([[1, 2]], "1-D")])
def test_padding_never_shortens(sequence: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pad_sequence_to_length(sequence, 2, 0)
