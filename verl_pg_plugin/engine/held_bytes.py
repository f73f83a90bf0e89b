"""What a layer's forward holds for its backward, counted where autograd saves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class HeldBytes:
    """Counts the storages that autograd saves in a block, each once, against what a checkpoint would hold instead."""

    def __init__(self, layer: nn.Module, given: Iterable[Any]) -> None:
        self._layer = layer
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        self._seen = {_storage(x) for x in tensors}
        self._inputs = {_storage(x): x.untyped_storage().nbytes() for x in tensors if x.requires_grad}
        self._knows_weights = False
        self._saved = 0

    @property
    def total(self) -> int:
        """Bytes that were saved and are not the layer's weights, less inputs that a checkpoint holds and this does not.

        A layer in bf16 that saves its input widened to float32 need not save the input.
        """
        return self._saved - sum(self._inputs.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved in the block; the tensors are saved as they are."""
        with torch.autograd.graph.saved_tensors_hooks(self._count, lambda x: x):
            yield

    def leave_out(self, x: torch.Tensor) -> None:
        """Do not count what is held anyway."""
        self._seen.add(_storage(x))

    def _count(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) not in (torch.Tensor, nn.Parameter):
            return x  # a compiler that traces the layer, when it first runs, saves stand-ins without storage
        if not self._knows_weights:  # not before: FSDP puts the gathered weights in when the layer starts
            self._seen.update(_storage(weight) for weight in _tensors_of(self._layer))
            self._knows_weights = True
        storage = _storage(x)
        self._inputs.pop(storage, None)
        if storage not in self._seen:
            self._seen.add(storage)
            self._saved += x.untyped_storage().nbytes()
        return x


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _tensors_of(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Weights and buffers; FSDP1 puts views of its flat parameter in as plain attributes."""
    for module in layer.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            yield from (x for x in held.values() if isinstance(x, torch.Tensor))
