"""What half-precision kernels have in common: the dtype they are given and whether they must be deterministic."""

import os

import torch


def cast_under_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """float32 inputs under autocast (norms kept in float32) in the autocast dtype, as transformers casts them."""
    if tensors[0].dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        return tuple(tensor.to(dtype) for tensor in tensors)
    return tensors


def deterministic_backward() -> bool:
    """FLASH_ATTENTION_DETERMINISTIC=1, the switch that transformers and verl read."""
    return os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
