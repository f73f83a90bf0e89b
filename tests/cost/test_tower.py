"""What patches cost, counted from a config's sizes, is what torch counts when the tower runs."""

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.modalities.tiny_vision import config_of
from verl_pg_plugin.cost.flops import ModelFlops

GRIDS = ((1, 8, 12), (1, 4, 8))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_patches_cost_what_torch_counts(kind: str) -> None:
    config = config_of(kind)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(config)
    pixels = torch.randn(sum(int(np.prod(grid)) for grid in GRIDS), 3 * 2 * 4 * 4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model.visual(pixels, grid_thw=torch.tensor(GRIDS))
    patches = np.array([np.prod(grid) for grid in GRIDS])
    assert ModelFlops.of(model).pictures(patches) == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_trusting_remote_code_changes_no_price(kind: str) -> None:
    config = config_of(kind)
    assert ModelFlops.of_config(config, trust_remote_code=True) == ModelFlops.of_config(config)


def test_a_model_without_a_tower_pays_for_none() -> None:
    flops = ModelFlops.of_config(transformers.Qwen3Config(num_hidden_layers=1, vocab_size=16))
    assert flops.tower is None
    assert flops.pictures(np.array([96])) == 0
