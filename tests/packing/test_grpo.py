"""`pack_grpo_data` against the plain loop over rows and samples, and against packing group by group."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.packing_reference import pack_batch_by_row, samples_by_row
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.test_packed_rows import EOS, assert_rows_equal
from verl_pg_plugin.packing import create_pack_group, pack_grouped_data, pack_grpo_data

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


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 5), st.integers(0, 40))
def test_equals_the_loop_for_any_batch_and_leaves_it_unchanged(batch: Batch, pack_num: int, slack: int) -> None:
    seq_length, before = batch[0].shape[1] + pack_num + slack, [array.copy() for array in batch]
    row: dict[str, Any] = {"pack_num": pack_num, "seq_length": seq_length, "pad_token_id": EOS}
    expected = pack_batch_by_row(*batch, **row)
    groups = create_pack_group(samples_by_row(*batch), pack_num, seq_length)
    for actual in (pack_grpo_data(*batch, **row), [pack_grouped_data(group, **row) for group in groups]):
        for actual_row, expected_row in zip(actual, expected, strict=True):
            assert_rows_equal(actual_row, expected_row)
            actual_row["prompt_completion_ids"][:] = -1
    for array, copy in zip(batch, before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_empty_prompts_and_responses_are_dropped_with_one_warning_each(caplog: pytest.LogCaptureFixture) -> None:
    batch = make_batch([(0, 2), (2, 2), (0, 2), (1, 1), (0, 0)], [(2, 4), (2, 4), (2, 2), (2, 4), (3, 3)], 4)
    with caplog.at_level(logging.WARNING):
        (row,) = pack_grpo_data(*batch, 1, seq_length=8, pad_token_id=EOS)
    np.testing.assert_array_equal(row["prompt_completion_ids"][:4], batch[0][0])
    # A sample without both is named once, with the empty prompts.
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "dropping samples [1, 3, 4]: their prompts_mask is all zero",
        "dropping samples [2]: their responses_mask is all zero",
    ]


@pytest.mark.parametrize("mask_dtype", [np.bool_, np.int8, np.float32])
def test_mask_dtypes_and_tensors_give_the_same_rows(mask_dtype: type) -> None:
    ids, prompts, responses, advantages = make_batch([(1, 3), (0, 3)], [(3, 5), (3, 6)], 6)
    row: dict[str, Any] = {"pack_num": 2, "seq_length": 20, "pad_token_id": EOS}
    (expected,) = pack_grpo_data(ids, prompts, responses, advantages, **row)
    masks: list[np.ndarray] = [prompts.astype(mask_dtype), responses.astype(mask_dtype)]
    typed: tuple[Any, ...] = (ids.astype(np.int32), *masks, advantages[:, None])
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
def test_a_batch_that_cannot_be_packed_is_refused(batch: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_grpo_data(*batch, **{"seq_length": 9, "pad_token_id": EOS, **options})
