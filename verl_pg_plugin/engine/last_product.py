"""The last product of a compiled layer, left out of its graphs so that recomputing the layer can do without it.

Nothing in a layer reads what the second matrix of its MLP returns: the result goes into the sum that is the next
layer's input. A checkpoint stops recomputing once it has what the backward needs, and so would stop in front of that
product, a quarter of the FLOPs of a recomputed layer of Qwen3-4B. But a compiled graph runs as a whole, and has the
product in it. Outside of the graphs it stays one matrix product of the same library, and nothing was fused with it.

A layer that is kept has nothing to stop for. There the product stays inside: its graph then holds the two inputs of the
activation and computes their product again in the backward, where an operator of its own would hold that one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TAKEN_IN = {"trace.enabled": False}
"""Options of the compiler of layers that are kept: the default, so they change no graph. torch guards nothing that it
met on its way to a break, and so would take graphs without the product for graphs with it; those of compilers with
different options it keeps apart."""


def compile_without(layer: nn.Module, dynamic: bool) -> Callable[..., Any]:
    """A layer's ``forward``, compiled with its last product left out wherever gradients are wanted.

    A product that is frozen stays inside, as under LoRA, whose own products come behind it.

    Args:
        layer: of transformers' usual form; one without such a product is compiled as it is.
        dynamic: see ``torch.compile``.
    """
    compiled = torch.compile(layer.forward, dynamic=dynamic)
    product = _last_product(layer)
    if product is None:
        return compiled
    leave_out(product)
    whole = torch.compile(layer.forward, dynamic=dynamic, options=TAKEN_IN)

    @wraps(layer.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if product.left_out else whole)(*args, **kwargs)

    return forward


def leave_out(product: Any) -> None:
    """Let a matrix stand between compiled graphs wherever gradients are wanted, unless it is frozen."""
    product.left_out = True
    product.forward = MethodType(_forward, product)  # one function for all layers, which so share their graphs


@contextmanager
def taken_in(layer: nn.Module) -> Iterator[None]:
    """In the block a layer's last product is part of its graphs."""
    product = _last_product(layer)
    if product is None or not hasattr(product, "left_out"):
        yield
        return
    product.left_out = False
    try:
        yield
    finally:
        product.left_out = True


def _last_product(layer: nn.Module) -> Any:
    """The second matrix of a layer's MLP, by the name that models of transformers give it; None without one."""
    product = getattr(getattr(layer, "mlp", None), "down_proj", None)
    return product if type(product) is nn.Linear else None


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    if self.left_out and torch.is_grad_enabled() and self.weight.requires_grad:
        return _uncompiled(input, self.weight, self.bias)
    return F.linear(input, self.weight, self.bias)


_uncompiled = torch.compiler.disable(F.linear, reason="a checkpoint stops in front of it")
