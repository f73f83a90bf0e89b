"""The tolerance that verify mode measures stays of use whatever the noise."""

import numpy as np
import pytest
import torch

from verl_pg_plugin.engine.verify import Tolerance, compare, read_responses, relative_errors, rounding_noise


@pytest.mark.parametrize("noise", [[1e-7] * 100, [float("nan"), 1e-7], [float("inf")]], ids=["little", "nan", "inf"])
def test_tolerances_of_float32_stay_near_one_ten_thousandth_whatever_the_noise(noise: list[float]) -> None:
    tolerance = Tolerance.from_noise([torch.tensor(noise)], torch.float32)
    assert tolerance.per_token == pytest.approx(1.2e-4, rel=0.05)
    assert tolerance.mean < tolerance.per_token


def test_a_tolerance_is_four_times_the_noise_where_that_is_more_than_a_few_steps() -> None:
    noise = [torch.tensor([0.01, 0.02]), torch.tensor([0.03])]
    for dtype in (torch.float32, torch.bfloat16):
        tolerance = Tolerance.from_noise(noise, dtype)
        assert (tolerance.per_token, tolerance.mean) == (pytest.approx(0.12), pytest.approx(0.08))


def test_one_token_may_be_off_as_far_in_a_response_of_any_length() -> None:
    tolerance = Tolerance(per_token=1.0, mean=0.1)
    assert [tolerance.of_mean(tokens) for tokens in (1, 10, 1000)] == [1.0, pytest.approx(0.2), pytest.approx(0.101)]


def test_errors_are_relative_above_one_and_absolute_below() -> None:
    found = relative_errors({"x": [torch.tensor([0.002, 20.0])]}, {"x": [torch.tensor([0.001, 10.0])]})
    assert found["x"][0].tolist() == pytest.approx([0.001, 1.0])


def test_what_is_not_a_number_on_one_side_is_an_infinite_error_and_on_both_sides_none() -> None:
    nan, inf = float("nan"), float("inf")
    got, expected = torch.tensor([nan, 1.0, nan, inf, -inf, inf]), torch.tensor([0.0, nan, nan, inf, -inf, 1.0])
    assert relative_errors({"x": [got]}, {"x": [expected]})["x"][0].tolist() == [inf, inf, 0.0, 0.0, 0.0, inf]


@pytest.mark.parametrize(("error", "is_off"), [(0.11, True), (0.09, False), (float("nan"), True)])
def test_a_token_beyond_the_tolerance_is_a_mismatch_that_is_named(error: float, is_off: bool) -> None:
    expected, got = [torch.zeros(3), torch.zeros(100)], [torch.zeros(3), torch.zeros(100)]
    got[1][42] = error
    _, worst = compare({"x": got}, {"x": expected}, {"x": Tolerance(per_token=0.1, mean=0.1)})
    assert (worst is not None) == is_off
    if worst is not None:
        assert worst[0] == 1
        assert worst[1].startswith("x of response token 42 of 100 is")


def test_a_faint_fault_in_every_token_is_a_mismatch() -> None:
    expected, got = torch.zeros(200), torch.full((200,), 0.05)
    max_error, worst = compare({"x": [got]}, {"x": [expected]}, {"x": Tolerance(per_token=0.1, mean=0.01)})
    assert max_error == pytest.approx(0.05)
    assert worst is not None


def test_responses_are_read_from_the_rows_in_front_of_their_tokens() -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(9.0), torch.tensor([0, 4, 9]))
    responses = read_responses({"log_probs": jagged}, [1, 0], np.array([2, 3]))
    assert [row.tolist() for row in responses["log_probs"]] == [[6.0, 7.0], [1.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_are_rounded_each_in_their_own_way_and_alike_in_every_process(dtype: torch.dtype) -> None:
    """Equal signs in all layers would add up, or cancel, and measure no rounding."""
    out = torch.linspace(1, 2, 4096).reshape(64, 64).to(dtype)
    first, second = (torch.stack([move(out) for _ in range(3)]) for move in (rounding_noise(), rounding_noise()))
    assert torch.equal(first, second)
    signs = (first.double() - out.double()).sign()
    assert (signs != 0).double().mean() > 0.9
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs((signs[a] * signs[b]).mean()) < 0.1
    assert ((first.double() - out.double()).abs() / out.double()).max() < 32 * torch.finfo(dtype).eps
