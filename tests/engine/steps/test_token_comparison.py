"""The tolerance that verify mode measures stays of use whatever the noise."""

import pytest
import torch

from verl_pg_plugin.engine.steps.token_comparison import Tolerance


def test_tolerances_of_float32_stay_near_one_ten_thousandth() -> None:
    noise = [torch.full((100,), 1e-7)]
    assert Tolerance.from_noise(noise, torch.float32).per_token == pytest.approx(1.2e-4, rel=0.05)


@pytest.mark.parametrize("noise", [[float("nan"), 1e-7], [float("inf")]], ids=["some", "all"])
def test_noise_without_bound_gives_no_tolerance_without_bound(noise: list[float]) -> None:
    tolerance = Tolerance.from_noise([torch.tensor(noise)], torch.float32)
    assert tolerance.per_token == pytest.approx(1.2e-4, rel=0.05)
    assert tolerance.mean < tolerance.per_token
