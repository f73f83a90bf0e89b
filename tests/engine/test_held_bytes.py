"""What a layer holds for its backward is counted without its weights."""

import torch
from torch import nn

from verl_pg_plugin.engine.held_bytes import HeldBytes


def test_views_of_flat_parameters_are_weights_and_no_activations() -> None:
    """FSDP1 puts them in as plain attributes."""
    flat, x = torch.ones(64, requires_grad=True), torch.ones(8, requires_grad=True)
    layer: nn.Module = nn.Module()
    layer.weight = flat[:8]
    held = HeldBytes(layer, [x])
    with held.counting():
        (x * layer.weight).exp()
    assert held.total == 8 * 4, "what exp returned"
