"""The noise that verify mode measures with is of a rounding step, another one in each layer, and repeats."""

import pytest
import torch

from verl_pg_plugin.engine.verify import rounding_noise


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
