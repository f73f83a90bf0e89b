"""Weights that verl's asynchronous trainers save and restore between updates, on the platform ``cpu``."""

from pathlib import Path

import torch
from verl.utils import fsdp_utils

from tests.support import make_engine, save_tiny_model


def test_saved_weights_are_restored_after_an_update(tmp_path: Path) -> None:
    module = make_engine(save_tiny_model(tmp_path)).module
    before = {name: weight.full_tensor().clone() for name, weight in module.named_parameters()}
    saved = fsdp_utils.fsdp2_sharded_save_to_cpu(module)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(1)
    fsdp_utils.fsdp2_sharded_load_from_cpu(module, *saved)
    for name, weight in module.named_parameters():
        assert torch.equal(weight.full_tensor(), before[name]), name
