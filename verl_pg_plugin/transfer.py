"""Copies from the host to the device for which the host does not wait."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """An index map on the device, int64 where nothing else is said; see ``send``."""
    return send(torch.from_numpy(np.ascontiguousarray(array)).to(dtype), device)


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on the device; through pinned memory, so that the host does not wait."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
