"""`pack_grpo_data` against the plain loop over rows and samples, and against packing group by group."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.packing_reference import pack_batch_by_row, samples_by_row
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pg_plugin.packing import create_pack_group, pack_grouped_data, pack_grpo_data

EOS = 7
Batch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def make_batch(prompt: list[tuple[int, int]], response: list[tuple[int, int]], seq: int, seed: int = 0) -> Batch:
    """A batch whose prompt and response masks are set on half-open spans; equal ends leave a mask empty."""
    rng = np.random.default_rng(seed)
    column = np.arange(seq)

    def mask(spans: list[tuple[int, int]]) -> np.ndarray:
        first, last = np.array(spans, dtype=np.int64).reshape(-1, 2).T[..., None]
        return ((column >= first) & (column < last)).astype(np.int64)

    return rng.integers(0, 150_000, (len(prompt), seq)), mask(prompt), mask(response), rng.standard_normal(len(prompt))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    seq = draw(st.integers(1, 24))
    prompt, response = [], []
    for _ in range(draw(st.integers(0, 8))):
        first, middle, last = sorted(draw(st.tuples(*[st.integers(0, seq)] * 3)))
        prompt.append((first, middle))
        response.append((middle, last))
    batch = make_batch(prompt, response, seq, draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):  # tool tokens: holes inside a response
        batch[2][:, draw(st.integers(0, seq - 1))] = 0
    return batch


def assert_same_rows(actual: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]]) -> None:
    assert len(actual) == len(expected)
    for actual_row, expected_row in zip(actual, expected, strict=True):
        assert list(actual_row) == list(expected_row)
        for name in expected_row:
            np.testing.assert_array_equal(actual_row[name], expected_row[name], err_msg=name)


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 5), st.integers(0, 40))
def test_equals_the_loop_for_any_batch(batch: Batch, pack_num: int, slack: int) -> None:
    seq_length = batch[0].shape[1] + pack_num + slack
    row: dict[str, Any] = {"pack_num": pack_num, "seq_length": seq_length, "pad_token_id": EOS}
    actual = pack_grpo_data(*batch, **row)
    assert_same_rows(actual, pack_batch_by_row(*batch, **row))
    groups = create_pack_group(samples_by_row(*batch), pack_num, seq_length)
    assert_same_rows(actual, [pack_grouped_data(group, **row) for group in groups])


def test_the_seeds_batch_of_4_prompts_and_8_generations_equals_the_loop() -> None:
    rng = np.random.default_rng(0)
    seq = 8192
    starts = np.repeat(rng.integers(0, 2000, 4), 8)
    batch = make_batch(
        [(int(first), 4096) for first in starts], [(4096, int(rng.integers(4097, seq))) for _ in range(32)], seq
    )
    for pack_num in (1, 3):
        row: dict[str, Any] = {"pack_num": pack_num, "seq_length": 2 * seq, "pad_token_id": EOS}
        assert_same_rows(pack_grpo_data(*batch, **row), pack_batch_by_row(*batch, **row))


def test_empty_prompts_and_responses_are_dropped_with_one_warning_each(caplog: pytest.LogCaptureFixture) -> None:
    batch = make_batch([(0, 2), (2, 2), (0, 2), (1, 1), (0, 0)], [(2, 4), (2, 4), (2, 2), (2, 4), (3, 3)], 4)
    with caplog.at_level(logging.WARNING):
        rows = pack_grpo_data(*batch, 1, seq_length=8, pad_token_id=EOS)
    assert len(rows) == 1
    np.testing.assert_array_equal(rows[0]["prompt_completion_ids"][:4], batch[0][0])
    # A sample without both is named once, with the empty prompts.
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "[1, 3, 4]" in messages[0]
    assert "prompts_mask" in messages[0]
    assert "[2]" in messages[1]
    assert "responses_mask" in messages[1]


def test_a_batch_without_a_usable_sample_gives_no_rows() -> None:
    assert pack_grpo_data(*make_batch([(0, 0)], [(2, 4)], 4), 1, seq_length=8, pad_token_id=EOS) == []
    assert pack_grpo_data(*make_batch([], [], 4), 1, seq_length=8, pad_token_id=EOS) == []


def test_masked_tool_tokens_inside_a_response_stay_in_the_row() -> None:
    ids, prompts, responses, advantages = make_batch([(0, 2)], [(2, 6)], 6)
    responses[0, 3:5] = 0
    (row,) = pack_grpo_data(ids, prompts, responses, advantages, 1, seq_length=8, pad_token_id=EOS)
    assert row["prompt_completion_ids"][:6].tolist() == ids[0].tolist()
    assert row["responses_mask"].tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    assert row["sample_valid_length"].tolist() == [2]


@pytest.mark.parametrize("mask_dtype", [np.bool_, np.int8, np.int32, np.float32])
def test_mask_dtypes_and_tensors_give_the_same_rows(mask_dtype: type) -> None:
    ids, prompts, responses, advantages = make_batch([(1, 3), (0, 3)], [(3, 5), (3, 6)], 6)
    row: dict[str, Any] = {"pack_num": 2, "seq_length": 20, "pad_token_id": EOS}
    expected = pack_grpo_data(ids, prompts, responses, advantages, **row)
    masks: list[np.ndarray] = [prompts.astype(mask_dtype), responses.astype(mask_dtype)]
    typed: tuple[Any, ...] = (ids.astype(np.int32), *masks, advantages[:, None])
    assert_same_rows(pack_grpo_data(*typed, **row), expected)
    assert_same_rows(pack_grpo_data(*map(torch.from_numpy, typed), **row), expected)


def test_rows_of_one_call_do_not_share_memory() -> None:
    rows = pack_grpo_data(*make_batch([(0, 2)] * 2, [(2, 4)] * 2, 4), 1, seq_length=8, pad_token_id=EOS)
    columns = [column for row in rows for column in row.values()]
    for index, column in enumerate(columns):
        assert not any(np.shares_memory(column, other) for other in columns[index + 1 :])


def test_inputs_are_left_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    batch = make_batch([(1, 3), (0, 3)], [(3, 5), (3, 6)], 6)
    before = [array.copy() for array in batch]
    for row in pack_grpo_data(*batch, 2, seq_length=20, pad_token_id=EOS):
        row["prompt_completion_ids"][:] = -1
    assert not caplog.records, "a clean batch warns of nothing"
    for array, copy in zip(batch, before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_a_sample_too_long_for_a_row_is_named_by_its_place_in_the_batch() -> None:
    batch = make_batch([(0, 0), (0, 2), (0, 2)], [(2, 4), (2, 3), (2, 4)], 4)
    with pytest.raises(ValueError, match=r"sample 2 has 4 tokens .* at least 5"):
        pack_grpo_data(*batch, 1, seq_length=4, pad_token_id=EOS)


def test_a_response_that_ends_before_its_prompt_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"samples \[1\] hold no tokens"):
        pack_grpo_data(*make_batch([(0, 2), (2, 4)], [(2, 4), (0, 1)], 4), 1, seq_length=9, pad_token_id=EOS)


def test_ragged_or_unequal_shapes_and_pack_num_below_one_are_refused() -> None:
    ids, prompts, responses, advantages = make_batch([(0, 2)] * 2, [(2, 4)] * 2, 4)
    row = {"seq_length": 9, "pad_token_id": EOS}
    with pytest.raises(ValueError, match="inhomogeneous shape"):
        pack_grpo_data(ids, [[1, 1, 0, 0], [1]], responses, advantages, **row)
    with pytest.raises(ValueError, match="one shape"):
        pack_grpo_data(ids, prompts[:, :3], responses, advantages, **row)
    with pytest.raises(ValueError, match="responses_mask must have shape"):
        pack_grpo_data(ids, prompts, responses[0], advantages, **row)
    with pytest.raises(ValueError, match="2 samples, got 1"):
        pack_grpo_data(ids, prompts, responses, advantages[:1], **row)
    with pytest.raises(ValueError, match="pack_num"):
        pack_grpo_data(ids, prompts, responses, advantages, 0, **row)
