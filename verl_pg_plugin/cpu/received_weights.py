"""A model's weights under the names by which verl's trainer sends them to a rollout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel
from verl.workers.engine.fsdp.utils import unfuse_moe_params


def received_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By name, tensors that share their memory with the model's.

    transformers keeps the experts of a layer in one tensor, and verl takes that apart: each expert's matrices are
    slices of it here, by verl's own function, which copies none of them.
    """
    return dict(unfuse_moe_params(model.state_dict().items(), model.config.model_type))


def received_parameters(model: PreTrainedModel) -> set[str]:
    """Names of those that a trainer sends, which leaves out buffers and second names of tied weights."""
    return set(dict(unfuse_moe_params(model.named_parameters(), model.config.model_type)))


@torch.no_grad()
def copy_weights(into: Mapping[str, torch.Tensor], named_tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors over those of the same names.

    Raises:
        RuntimeError: a shape that the model does not have.
    """
    for name, tensor in named_tensors.items():
        if tensor.shape != into[name].shape:
            raise RuntimeError(f"{name} is {tuple(tensor.shape)}, the model has {tuple(into[name].shape)}")
        into[name].copy_(tensor)
