"""Two images have one number exactly if every bit of them is the same."""

from collections.abc import Hashable

import pytest
import torch

from tests.modalities.tiny_vision import IMAGE
from verl_pg_plugin.modalities.image_keys import Image, Kind, _content

KIND = Kind("image", "pixel_values", "image_grid_thw", IMAGE)
SHOWN = Image(0, KIND, first=0, num_tokens=2, patches=slice(0, 8), grid=(2, 4))


def contents(*pixels: torch.Tensor) -> list[Hashable]:
    known: dict[Hashable, list[torch.Tensor]] = {}
    return [_content(known, SHOWN, of_one) for of_one in pixels]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("width", [96, 3])
def test_patches_in_another_order_are_another_image(dtype: torch.dtype, width: int) -> None:
    """Their sums are equal, so only the comparison of every bit tells them apart."""
    pixels = torch.arange(8 * width).reshape(8, width).to(dtype)
    one, other, same, again = contents(pixels, pixels.flip(0), pixels.clone(), pixels.flip(0))
    assert one == same != other == again


def test_one_number_off_by_one_bit_is_another_image() -> None:
    pixels, changed = torch.zeros(8, 96), torch.zeros(8, 96)
    changed[-1, -1] = -0.0
    one, other, same = contents(pixels, changed, pixels)
    assert one == same != other


def test_a_part_of_a_larger_tensor_is_read_wherever_it_starts() -> None:
    many = torch.arange(27, dtype=torch.uint8).reshape(9, 3)
    one, other, same = contents(many[1:], many[:8], many[1:].clone())
    assert one == same != other
