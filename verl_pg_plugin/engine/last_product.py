"""The last product of a compiled layer, left out of its graphs so that recomputing the layer can do without it.

In most models nothing in a layer reads what the second matrix of its MLP returns: the result goes into the sum that is
the next layer's input. A checkpoint stops recomputing once it has what the backward needs, and so would stop in front
of that product, a quarter of the FLOPs of a recomputed layer of Qwen3-4B. But a compiled graph runs as a whole, and has
the product in it. Outside of the graphs it stays one matrix product of the same library, and nothing was fused with it.

A layer that is kept runs the same graphs, so that its gradients are those of a recomputed one to the last bit, in
whatever precision: what memory is left must not decide what is learned. It holds the input of the product for that.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NORMS_BEHIND_THE_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm")
"""Of Gemma 2 and 3, OLMo 2, GLM 4 and their kin, whose backward wants the product."""


def last_product(layer: nn.Module) -> nn.Linear | None:
    """The second matrix of a layer's MLP, by its name in transformers' models; None where a norm reads the product."""
    if any(hasattr(layer, norm) for norm in NORMS_BEHIND_THE_MLP):
        return None
    product = getattr(getattr(layer, "mlp", None), "down_proj", None)
    return product if type(product) is nn.Linear else None


def leave_out(product: Any) -> None:
    """Let a matrix stand between compiled graphs wherever gradients are wanted; call it before they are compiled.

    One that is frozen stays inside, as under LoRA, whose own products come behind it.
    """
    product.forward = MethodType(_forward, product)  # one function for all layers, which so share their graphs


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and self.weight.requires_grad:
        return _uncompiled(input, self.weight, self.bias)
    return F.linear(input, self.weight, self.bias)


_uncompiled = torch.compiler.disable(F.linear, reason="a checkpoint stops in front of it")
