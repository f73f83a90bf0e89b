"""`batch_unsorted_segment_sum` against one plain segment sum a row, in values, gradients, dtypes and errors."""

import numpy as np
import pytest
import torch
from benchmarks.packing_reference import segment_sum_by_row
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pg_plugin.packing import batch_unsorted_segment_sum

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _skip_without_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


def random_case(bs: int, seq: int, num_segments: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(bs, seq, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, num_segments, (bs, seq), generator=generator)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 70), st.integers(1, 40), st.integers(0, 2**31))
def test_equals_the_loop_for_any_shape(bs: int, seq: int, num_segments: int, seed: int) -> None:
    values, ids = random_case(bs, seq, num_segments, seed)
    # One order of additions on both sides, so not even the last bit may differ.
    assert torch.equal(
        batch_unsorted_segment_sum(values, ids, num_segments), segment_sum_by_row(values, ids, num_segments)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_segments", [32, 500], ids=["few-segments", "many-segments"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_dtype_keeps_its_dtype_and_its_accuracy(device: str, num_segments: int, dtype: torch.dtype) -> None:
    values, ids = random_case(3, 5000, num_segments)
    values = values.to(dtype)
    actual = batch_unsorted_segment_sum(values.to(device), ids.to(device), num_segments)
    assert actual.dtype == dtype
    exact = segment_sum_by_row(values.double(), ids, num_segments)
    # Float32 sums of some hundred values, then one rounding to the result's dtype.
    tolerance = torch.finfo(dtype).eps / 2 * exact.abs() + (1e-12 if dtype == torch.float64 else 1e-4)
    assert ((actual.cpu().double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_values_are_not_lost_in_a_large_sum(dtype: torch.dtype) -> None:
    ones = torch.ones(1, 4096, dtype=dtype)
    # A running sum in bfloat16 stops at 256, in float16 at 2048.
    assert batch_unsorted_segment_sum(ones, torch.zeros(1, 4096, dtype=torch.int64), 1).item() == 4096


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integer_values_sum_exactly(dtype: torch.dtype) -> None:
    values = torch.tensor([[2**30, 1, 2**29, 3], [16, 32, 64, 128]], dtype=dtype)
    sums = batch_unsorted_segment_sum(values, torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]]), 3)
    assert sums.dtype == dtype
    assert sums.tolist() == [[2**30 + 2**29, 4, 0], [128, 112, 0]]


@pytest.mark.parametrize("device", DEVICES)
def test_an_infinity_stays_in_its_own_segment(device: str) -> None:
    values = torch.zeros(1, 300, device=device)
    values[0, 7] = float("inf")
    ids = torch.zeros(1, 300, dtype=torch.int64, device=device)
    ids[0, 7] = 1
    assert batch_unsorted_segment_sum(values, ids, 2).tolist() == [[0.0, float("inf")]]


@pytest.mark.parametrize("contiguous", [True, False])
def test_gradients_pass_gradcheck_to_second_order(contiguous: bool) -> None:
    values, ids = random_case(3, 12, 4)
    if contiguous:
        values.requires_grad_()
        torch.autograd.gradcheck(lambda v: batch_unsorted_segment_sum(v, ids, 4), (values,))
        torch.autograd.gradgradcheck(lambda v: batch_unsorted_segment_sum(v, ids, 4), (values,))
    else:
        transposed = values.t().contiguous().requires_grad_()
        torch.autograd.gradcheck(lambda v: batch_unsorted_segment_sum(v.t(), ids, 4), (transposed,))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_each_token_gets_its_segments_gradient(device: str, dtype: torch.dtype, contiguous: bool) -> None:
    values, ids = random_case(64, 1024, 20)
    ids = (ids.sort(dim=1).values if contiguous else ids).to(device)
    values = values.to(device, dtype).requires_grad_()
    weights = torch.randn(64, 20, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    batch_unsorted_segment_sum(values, ids, 20).backward(weights)
    assert values.grad is not None
    assert values.grad.dtype == dtype
    assert torch.equal(values.grad, weights.gather(1, ids))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_segments", [4, 500], ids=["few-segments", "many-segments"])
@pytest.mark.parametrize("shape", [(3, 50), (64, 1024)], ids=["small", "threaded"])
@pytest.mark.parametrize("bad_id", [-1, "num_segments", 2**32])
def test_an_id_out_of_range_raises_and_names_the_range(
    device: str, num_segments: int, shape: tuple[int, int], bad_id: int | str
) -> None:
    values = torch.ones(shape, device=device)
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    ids[-1, -1] = num_segments if isinstance(bad_id, str) else bad_id
    with pytest.raises(IndexError, match=f"num_segments={num_segments}"):
        batch_unsorted_segment_sum(values, ids, num_segments)
    # The device must stay usable: no assertion in a kernel.
    assert batch_unsorted_segment_sum(values, torch.zeros_like(ids), num_segments)[0, 0].item() == shape[1]


def test_an_id_one_row_too_far_is_not_added_to_the_next_row() -> None:
    values = np.ones((2, 3), dtype=np.float32)
    with pytest.raises(IndexError):
        batch_unsorted_segment_sum(values, np.array([[0, 1, 2], [0, 1, 1]]), 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(0, 50), st.integers(1, 9), st.integers(0, 2**31))
def test_numpy_arrays_give_numpy_arrays_of_the_same_sums(bs: int, seq: int, num_segments: int, seed: int) -> None:
    values, ids = random_case(bs, seq, num_segments, seed)
    actual = batch_unsorted_segment_sum(values.numpy(), ids.numpy(), num_segments)
    assert isinstance(actual, np.ndarray)
    expected = np.zeros((bs, num_segments))
    np.add.at(expected, (np.arange(bs)[:, None], ids.numpy()), values.numpy())
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_read_only_reversed_and_big_endian_arrays_are_summed(dtype: type) -> None:
    values: np.ndarray = np.arange(8, dtype=dtype).reshape(2, 4)
    ids = np.array([[0, 0, 1, 1], [1, 0, 1, 0]], dtype=np.int32)
    expected = batch_unsorted_segment_sum(values, ids, 2)
    assert expected.dtype == dtype
    values.setflags(write=False)
    np.testing.assert_array_equal(batch_unsorted_segment_sum(values, ids, 2), expected)
    reverse = batch_unsorted_segment_sum(values[::-1, ::-1], ids[::-1, ::-1], 2)
    np.testing.assert_array_equal(reverse, expected[::-1])
    np.testing.assert_array_equal(
        batch_unsorted_segment_sum(values.astype(values.dtype.newbyteorder(">")), ids, 2), expected
    )


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8])
def test_ids_of_any_integer_dtype_are_taken_and_inputs_left_unchanged(dtype: torch.dtype) -> None:
    values, ids = random_case(2, 30, 5)
    given = values.clone(), ids.to(dtype)
    expected = segment_sum_by_row(values, ids, 5)
    assert torch.equal(batch_unsorted_segment_sum(*given, 5), expected)
    assert torch.equal(given[0], values)
    assert torch.equal(given[1], ids.to(dtype))


@pytest.mark.parametrize(
    ("values", "ids", "num_segments", "error"),
    [
        (torch.ones(2, 3), torch.zeros(2, 4, dtype=torch.int64), 1, ValueError),
        (torch.ones(6), torch.zeros(6, dtype=torch.int64), 1, ValueError),
        (torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64), 0, ValueError),
        (torch.ones(2, 3), torch.zeros(2, 3), 1, TypeError),
        (torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), 1, TypeError),
        (torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int64), 1, TypeError),
        (torch.ones(2, 3, dtype=torch.complex64), torch.zeros(2, 3, dtype=torch.int64), 1, TypeError),
        (np.ones((2, 3)), torch.zeros(2, 3, dtype=torch.int64), 1, TypeError),
        ([[1.0]], [[0]], 1, TypeError),
    ],
)
def test_wrong_arguments_are_refused(values: object, ids: object, num_segments: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        batch_unsorted_segment_sum(values, ids, num_segments)
