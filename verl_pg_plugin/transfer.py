"""Host-to-device copies that do not block the host."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return an index array as a tensor on the device; see ``send``."""
    return send(torch.from_numpy(np.ascontiguousarray(array)).to(dtype), device)


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return the tensor on the device, copied through pinned memory so that the host does not block."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
