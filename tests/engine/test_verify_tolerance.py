"""The tolerance that verify mode measures stays of use whatever the noise."""

import pytest
import torch

from verl_pg_plugin.engine.verify import Tolerance, compare, relative_errors, rounding_noise


@pytest.mark.parametrize("noise", [[1e-7] * 100, [float("nan"), 1e-7], [float("inf")]], ids=["little", "nan", "inf"])
def test_tolerances_of_float32_stay_near_one_ten_thousandth_whatever_the_noise(noise: list[float]) -> None:
    tolerance = Tolerance.from_noise([torch.tensor(noise)], torch.float32)
    assert tolerance.per_token == pytest.approx(1.2e-4, rel=0.05)
    assert tolerance.mean < tolerance.per_token


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
