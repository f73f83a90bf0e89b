"""`batch_unsorted_segment_sum` against one plain segment sum for each row: values, gradients, dtypes and errors."""

import numpy as np
import pytest
import torch
from benchmarks.packing_reference import segment_sum_by_row
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pg_plugin.packing import batch_unsorted_segment_sum

ID_DTYPES = [torch.int64, torch.int16, torch.int32, torch.uint8]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_case(bs: int, seq: int, num_segments: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(bs, seq, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, num_segments, (bs, seq), generator=generator)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 70), st.integers(1, 40), st.sampled_from(ID_DTYPES), st.integers(0, 2**31))
def test_sums_of_tensors_and_arrays_equal_the_loop(bs, seq, num_segments, dtype, seed) -> None:
    values, ids = random_case(bs, seq, num_segments, seed)
    # Both sides add in one order, so not even the last bit may differ.
    expected, ids = segment_sum_by_row(values, ids, num_segments), ids.to(dtype)
    assert torch.equal(batch_unsorted_segment_sum(values, ids, num_segments), expected)
    of_arrays = batch_unsorted_segment_sum(values.numpy(), ids.numpy(), num_segments)
    assert isinstance(of_arrays, np.ndarray)
    np.testing.assert_array_equal(of_arrays, expected.numpy())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_segments", [32, 500], ids=["few-segments", "many-segments"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_float_dtypes_keep_dtype_and_accuracy(device: str, num_segments: int, dtype: torch.dtype) -> None:
    values, ids = random_case(3, 5000, num_segments)
    values = values.to(dtype)
    actual = batch_unsorted_segment_sum(values.to(device), ids.to(device), num_segments)
    assert actual.dtype == dtype
    exact = segment_sum_by_row(values.double(), ids, num_segments)
    # Float32 sums of some hundred values, then one rounding to the result's dtype.
    tolerance = torch.finfo(dtype).eps / 2 * exact.abs() + (1e-12 if dtype == torch.float64 else 1e-4)
    assert ((actual.cpu().double() - exact).abs() <= tolerance).all()


def test_integer_values_sum_exactly() -> None:
    for dtype in (torch.int64, torch.int32):
        values = torch.tensor([[2**30, 1, 2**29, 3], [16, 32, 64, 128]], dtype=dtype)
        sums = batch_unsorted_segment_sum(values, torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]]), 3)
        assert sums.dtype == dtype
        assert sums.tolist() == [[2**30 + 2**29, 4, 0], [128, 112, 0]]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_pass_gradcheck_to_second_order(device: str) -> None:
    values, ids = (x.to(device) for x in random_case(3, 12, 4))
    for leaf in (values, values.t().contiguous().t()):
        leaf = leaf.detach().requires_grad_()
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):  # a GPU adds in any order
            check(lambda v: batch_unsorted_segment_sum(v, ids, 4), (leaf,), nondet_tol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 50), (64, 1024)], ids=["small", "threaded"])
@pytest.mark.parametrize("bad_id", [-1, 4, 2**32])
def test_ids_out_of_range_raise_with_the_range(device: str, shape: tuple[int, int], bad_id: int) -> None:
    values, ids = torch.ones(shape, device=device), torch.zeros(shape, dtype=torch.int64, device=device)
    ids[0, -1] = bad_id  # 4 would be the next row's first segment
    with pytest.raises(IndexError, match="num_segments=4"):
        batch_unsorted_segment_sum(values, ids, 4)
    # The device stays usable: the check is no assertion in a kernel.
    assert batch_unsorted_segment_sum(values, torch.zeros_like(ids), 4)[0, 0].item() == shape[1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_read_only_reversed_and_big_endian_arrays_are_summed(dtype: type) -> None:
    values: np.ndarray = np.arange(8, dtype=dtype).reshape(2, 4)
    ids = np.array([[0, 0, 1, 1], [1, 0, 1, 0]], dtype=np.int32)
    expected = batch_unsorted_segment_sum(values, ids, 2)
    assert expected.dtype == dtype
    values.setflags(write=False)
    np.testing.assert_array_equal(batch_unsorted_segment_sum(values, ids, 2), expected)
    np.testing.assert_array_equal(batch_unsorted_segment_sum(values[::-1, ::-1], ids[::-1, ::-1], 2), expected[::-1])
    big_endian = values.astype(values.dtype.newbyteorder(">"))
    np.testing.assert_array_equal(batch_unsorted_segment_sum(big_endian, ids, 2), expected)


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
