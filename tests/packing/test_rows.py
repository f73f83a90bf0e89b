"""Packing into rows of one fixed length, compared with plain loops and with a row written by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.packing_reference import group_by_loop, pack_batch_by_row, samples_by_row
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pg_plugin.packing import create_pack_group, pack_grouped_data, pack_grpo_data, pad_sequence_to_length

Batch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
EOS = 7


def make_batch(prompt: list[tuple[int, int]], response: list[tuple[int, int]], seq: int, seed: int = 0) -> Batch:
    """Make a batch with prompt and response masks on half-open spans; equal ends leave a mask empty."""
    rng, column = np.random.default_rng(seed), np.arange(seq)

    def mask(spans: list[tuple[int, int]]) -> np.ndarray:
        first, last = np.array(spans, dtype=np.int64).reshape(-1, 2).T[..., None]
        return ((column >= first) & (column < last)).astype(np.int64)

    return rng.integers(0, 150_000, (len(prompt), seq)), mask(prompt), mask(response), rng.standard_normal(len(prompt))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    seq, prompt, response = draw(st.integers(1, 24)), [], []
    for _ in range(draw(st.integers(0, 8))):
        first, middle, last = sorted(draw(st.tuples(*[st.integers(0, seq)] * 3)))
        prompt.append((first, middle))
        response.append((middle, last))
    batch = make_batch(prompt, response, seq, seed := draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):  # tool tokens: holes inside a response
        batch[2][...] *= np.random.default_rng(seed).integers(0, 2, batch[2].shape)
    return batch


def assert_rows_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 5), st.integers(0, 40))
def test_packing_matches_the_loop_and_keeps_its_input(batch: Batch, pack_num: int, slack: int) -> None:
    samples, before = samples_by_row(*batch), [array.copy() for array in batch]
    longest = max((sample["response_end_index"] - sample["prompt_start_idx"] + 1 for sample in samples), default=0)
    row: dict[str, Any] = {"pack_num": pack_num, "seq_length": longest + pack_num + slack, "pad_token_id": EOS}
    expected = pack_batch_by_row(*batch, **row)
    groups, by_loop = (group(samples, pack_num, row["seq_length"]) for group in (create_pack_group, group_by_loop))
    assert [[id(sample) for sample in pack] for pack in groups] == [[id(s) for s in pack] for pack in by_loop]
    for actual in (pack_grpo_data(*batch, **row), [pack_grouped_data(group, **row) for group in groups]):
        for actual_row, expected_row in zip(actual, expected, strict=True):
            assert_rows_equal(actual_row, expected_row)
            actual_row["prompt_completion_ids"][:] = -1
    for array, copy in zip(batch, before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_empty_prompts_and_responses_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    batch = make_batch([(0, 2), (2, 2), (0, 2), (1, 1), (0, 0)], [(2, 4), (2, 4), (2, 2), (2, 4), (3, 3)], 4)
    (row,) = pack_grpo_data(*batch, 1, seq_length=8, pad_token_id=EOS)
    np.testing.assert_array_equal(row["prompt_completion_ids"][:4], batch[0][0])
    # A sample without both is named once, with the empty prompts.
    assert caplog.messages == [
        "dropping samples [1, 3, 4]: their prompts_mask is all zero",
        "dropping samples [2]: their responses_mask is all zero",
    ]


def test_mask_dtypes_and_tensors_give_equal_rows() -> None:
    ids, prompts, responses, advantages = make_batch([(1, 3), (0, 3)], [(3, 5), (3, 6)], 6)
    row: dict[str, Any] = {"pack_num": 2, "seq_length": 20, "pad_token_id": EOS}
    (expected,) = pack_grpo_data(ids, prompts, responses, advantages, **row)
    for dtype in (np.bool_, np.int8, np.float32):
        typed = ids.astype(np.int32), prompts.astype(dtype), responses.astype(dtype), advantages[:, None]
        for given_batch in (typed, map(torch.from_numpy, typed)):
            (actual,) = pack_grpo_data(*given_batch, **row)
            assert_rows_equal(actual, expected)


IDS, PROMPTS, RESPONSES, ADVANTAGES = GOOD = make_batch([(0, 2)] * 2, [(2, 4)] * 2, 4)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ((IDS, [[1, 1, 0, 0], [1]], RESPONSES, ADVANTAGES), {}, "inhomogeneous shape"),
        ((IDS, PROMPTS[:, :3], RESPONSES, ADVANTAGES), {}, "one shape"),
        ((IDS, PROMPTS, RESPONSES[0], ADVANTAGES), {}, "responses_mask must have shape"),
        ((IDS, PROMPTS, RESPONSES, ADVANTAGES[:1]), {}, "2 samples, got 1"),
        (GOOD, {"pack_num": 0}, "pack_num"),
        # Samples are named by their place in the batch.
        (make_batch([(0, 0), (0, 2), (0, 2)], [(2, 4), (2, 3), (2, 4)], 4), {"seq_length": 4}, "sample 2 has 4 tokens"),
        (make_batch([(0, 2), (2, 4)], [(2, 4), (0, 1)], 4), {}, r"samples \[1\] hold no tokens"),
    ],
)
def test_batches_that_cannot_be_packed_are_refused(batch: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_grpo_data(*batch, **{"seq_length": 9, "pad_token_id": EOS, **options})


NAMES = ("prompt_completion_ids", "response_mask", "advantage", "prompt_start_idx", "response_end_index")
SAMPLE = dict(zip(NAMES, (np.arange(6), np.ones(6, dtype=np.int64), 0.5, 0, 5), strict=True))


def test_one_row_matches_its_written_form_and_dtypes() -> None:
    written = (([0, 11, EOS, 13], [0, 0, 1, 1], 0.5, 1, 3), ([21, 22, 0, 0], [0, 1, 0, 0], -2.0, 0, 1))
    samples = [dict(zip(NAMES, sample, strict=True)) for sample in written]
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
        ({}, 1, 0, 20, "pack_num"),
        ({"response_end_index": 6}, 1, 1, 20, "inside"),
        ({"prompt_start_idx": 5, "response_end_index": 4}, 1, 1, 20, "no tokens"),
        ({"response_mask": np.ones(5, dtype=np.int64)}, 1, 1, 20, "equally long"),
        ({"prompt_completion_ids": np.ones((6, 1), dtype=np.int64)}, 1, 1, 20, "1-D"),
        ({}, 0, 2, 50, "got 0"),
        ({}, 3, 2, 50, "got 3"),
        ({}, 3, 4, 21, "needs 22 tokens"),
    ],
)
def test_samples_that_cannot_be_packed_are_refused(change, num_samples, pack_num, seq_length, message) -> None:
    samples = [SAMPLE | change] * num_samples
    with pytest.raises(ValueError, match=message):
        pack_grouped_data(samples, pack_num, seq_length=seq_length, pad_token_id=EOS)


@given(st.lists(st.integers(-5, 5), max_size=8), st.integers(0, 6), st.integers(-9, 9))
def test_padding_appends_and_keeps_the_dtype(values: list[int], extra: int, pad_value: int) -> None:
    padded = pad_sequence_to_length(np.array(values, dtype=np.int32), len(values) + extra, pad_value)
    assert padded.tolist() == values + [pad_value] * extra
    assert padded.dtype == np.int32


def test_padding_that_shortens_or_overflows_is_refused() -> None:
    for sequence, message in (([1, 2, 3], "lose tokens"), ([[1, 2]], "1-D")):
        with pytest.raises(ValueError, match=message):
            pad_sequence_to_length(sequence, 2, 0)
    with pytest.raises(OverflowError):
        pad_sequence_to_length(np.zeros(1, dtype=np.uint8), 2, -100)
