"""Two images have one number exactly if every bit of them is the same."""

import pytest
import torch

from tests.modalities.tiny_vision import IMAGE
from verl_pg_plugin.modalities.image_keys import Image, Kind, _Contents

KIND = Kind("image", "pixel_values", "image_grid_thw", IMAGE)
SHOWN = Image(0, KIND, first=0, num_tokens=2, patches=slice(0, 8), grid=(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("width", [96, 3])
def test_patches_in_another_order_are_another_image(dtype: torch.dtype, width: int) -> None:
    """Their sums are equal, so only the comparison of every bit tells them apart."""
    pixels = torch.arange(8 * width).reshape(8, width).to(dtype)
    contents = _Contents()
    numbers = [contents.number(SHOWN, shown) for shown in (pixels, pixels.flip(0), pixels.clone(), pixels.flip(0))]
    assert numbers == [0, 1, 0, 1]


def test_one_number_off_by_one_bit_is_another_image() -> None:
    pixels, changed, contents = torch.zeros(8, 96), torch.zeros(8, 96), _Contents()
    changed[-1, -1] = -0.0
    assert [contents.number(SHOWN, shown) for shown in (pixels, changed, pixels)] == [0, 1, 0]


def test_a_part_of_a_larger_tensor_is_read_wherever_it_starts() -> None:
    many = torch.arange(27, dtype=torch.uint8).reshape(9, 3)
    contents = _Contents()
    assert contents.number(SHOWN, many[1:]) != contents.number(SHOWN, many[:8])
    assert contents.number(SHOWN, many[1:].clone()) == contents.number(SHOWN, many[1:])
