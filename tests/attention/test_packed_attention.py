"""The packed op equals attention of every sequence alone, in float64 to 1e-10."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.dense import Outcome, dense_outcome, packed_outcome, random_tensors
from tests.layout.tries import Batch, batch_of, batches, segment_paths, sequence_rows
from verl_pg_plugin.attention.kernels.selection import VarlenKernel, select_kernel
from verl_pg_plugin.attention.packed_rows import PackedRows
from verl_pg_plugin.attention.shared_rows import AttentionOptions

PROMPT = tuple(range(100, 112))
GROUP = batch_of((PROMPT, range(1, 8)), (PROMPT, (9, 8)), (PROMPT, range(20, 25)), ((3, 4), (5, 6)))


def assert_equal(actual: Outcome, expected: Outcome, tolerance: float = 1e-10) -> None:
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


@given(batches(), st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.sampled_from([-1, 0, 1, 3]), st.integers(0, 999))
@settings(max_examples=60)
def test_random_tries_attend_like_their_sequences_alone(
    batch: Batch, heads: tuple[int, int], window_size: int, seed: int
) -> None:
    layout = batch.layout()
    tensors = random_tensors(layout.num_tokens, *heads, head_dim=4, seed=seed, dtype=torch.float64)
    expected = dense_outcome(tensors, layout, batch.sequences, window_size)
    assert_equal(packed_outcome(tensors, layout, window_size), expected)


@pytest.mark.parametrize("window_size", [-1, 5, 12, 100], ids=["full", "in response", "across fork", "wider"])
def test_a_grpo_group_attends_like_its_sequences_alone(window_size: int) -> None:
    layout = GROUP.layout()
    tensors = random_tensors(layout.num_tokens, heads=8, kv_heads=2, head_dim=16, seed=0, dtype=torch.float64)
    expected = dense_outcome(tensors, layout, GROUP.sequences, window_size)
    assert_equal(packed_outcome(tensors, layout, window_size), expected)


def test_changing_one_response_leaves_its_siblings_bit_equal() -> None:
    layout = GROUP.layout()
    tensors = random_tensors(layout.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=1, dtype=torch.float32)
    before = packed_outcome(tensors, layout)
    changed = sequence_rows(layout, GROUP.sequences[0])[len(PROMPT) - 1 :]
    for tensor in (tensors.q, tensors.k, tensors.v):
        tensor[changed] += 1.0
    after = packed_outcome(tensors, layout)
    others = [row for row in range(layout.num_tokens) if row not in changed]
    assert torch.equal(after.out[others], before.out[others])
    assert torch.equal(after.dq[others], before.dq[others])
    assert not torch.isclose(after.out[changed], before.out[changed]).all(dim=-1).any()


def test_the_gradient_of_one_response_reaches_no_sibling() -> None:
    layout = GROUP.layout()
    tensors = random_tensors(layout.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=2, dtype=torch.float64)
    own = sequence_rows(layout, GROUP.sequences[1])[len(PROMPT) - 1 :]
    tensors.grad_out[[row for row in range(layout.num_tokens) if row not in own]] = 0.0
    outcome = packed_outcome(tensors, layout)
    visible = next(path for path in segment_paths(layout) if path[-1] == own[-1])
    hidden = [row for row in range(layout.num_tokens) if row not in visible]
    for gradient in (outcome.dq, outcome.dk, outcome.dv):
        assert not gradient[hidden].any()
    assert outcome.dk[visible].flatten(1).any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    layout = GROUP.layout()
    outcome = packed_outcome(random_tensors(layout.num_tokens, 4, 2, 8, seed=3, dtype=dtype), layout)
    assert {outcome.out.dtype, outcome.dq.dtype, outcome.dk.dtype, outcome.dv.dtype} == {dtype}


def test_softcap_on_sdpa_is_refused_and_not_ignored() -> None:
    layout = GROUP.layout()
    packed = PackedRows.from_layout(layout, select_kernel("sdpa", "cpu"), "cpu")
    tensors = random_tensors(layout.num_tokens, 2, 1, 4, seed=5, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"softcap needs \+\+prefix_grouper\.attention_kernel=flash_attn_2"):
        packed.attend_packed(tensors.q, tensors.k, tensors.v, AttentionOptions(1.0, softcap=30.0))


def test_where_nothing_is_shared_no_key_is_copied() -> None:
    layout = batch_of(((1, 2, 3), (4, 5)), ((6, 7), (8,))).layout()
    packed = PackedRows.from_layout(layout, select_kernel("sdpa", "cpu"), "cpu")
    assert packed.copies is None
    assert PackedRows.from_layout(GROUP.layout(), select_kernel("sdpa", "cpu"), "cpu").copies is not None


def test_padding_rows_follow_the_others_and_attend_to_nothing() -> None:
    layout = GROUP.layout()
    packed = PackedRows.from_layout(layout, select_kernel("sdpa", "cpu"), "cpu")
    tensors = random_tensors(layout.num_tokens + 3, heads=4, kv_heads=2, head_dim=8, seed=6, dtype=torch.float64)
    options = AttentionOptions(8**-0.5)
    padded = packed.attend_packed(tensors.q, tensors.k, tensors.v, options)
    alone = packed.attend_packed(*(x[: layout.num_tokens] for x in (tensors.q, tensors.k, tensors.v)), options)
    assert torch.equal(padded[: layout.num_tokens], alone)
    assert padded.shape == tensors.q.shape
    assert not padded[layout.num_tokens :].any()


def test_a_kernel_is_told_how_long_the_longest_segment_is() -> None:
    """sdpa does not look at it; flash-attn leaves out what lies behind."""
    layout, told = GROUP.layout(), []

    def attend(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        told.extend(args[4:6])
        return q

    packed = PackedRows.from_layout(layout, VarlenKernel("sdpa", "", attend), "cpu")
    tensors = random_tensors(layout.num_tokens, heads=2, kv_heads=2, head_dim=8, seed=7, dtype=torch.float64)
    packed.attend_packed(tensors.q, tensors.k, tensors.v, AttentionOptions(1.0))
    assert told == [11, 11 + 7], "the prompt's rows but its last; that one and all of the longest response but its end"


def test_a_scale_of_the_models_own_is_used() -> None:
    layout = GROUP.layout()
    packed = PackedRows.from_layout(layout, select_kernel("sdpa", "cpu"), "cpu")
    tensors = random_tensors(layout.num_tokens, heads=2, kv_heads=2, head_dim=16, seed=8, dtype=torch.float64)
    scaled = packed.attend_packed(tensors.q, tensors.k, tensors.v, AttentionOptions(0.1))
    by_hand = packed.attend_packed(tensors.q * 0.4, tensors.k, tensors.v, AttentionOptions(0.25))
    torch.testing.assert_close(scaled, by_hand, rtol=1e-10, atol=1e-10)
