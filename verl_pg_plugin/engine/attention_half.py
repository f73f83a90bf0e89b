"""The attention half of a layer, from its projections to its last product, checkpointed while the MLP keeps all.

At the shape of Qwen3-4B that is what ``prefix_grouper.keep_activations=mlp`` stands for: four fifths of the matrix
products that a recomputed layer runs again, for three quarters of what a whole layer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl_pg_plugin.engine.activation_budget import KEEP_ACTIVATIONS
from verl_pg_plugin.engine.compiled_layers import compile_part
from verl_pg_plugin.engine.last_product import leave_out


class AttentionHalf:
    """Stands in front of the ``forward`` of a layer's attention module.

    Raises:
        ValueError: the layer names no such module.
    """

    def __init__(self, layer: nn.Module, context_fn: Callable[[], Any], compiled: bool, dynamic: bool) -> None:
        half: Any = getattr(layer, "self_attn", None)
        if half is None or isinstance(half, nn.ModuleList):
            raise ValueError(
                f"{KEEP_ACTIVATIONS}=mlp: {type(layer).__name__} has no self_attn that could be computed again alone; "
                f"set ++{KEEP_ACTIVATIONS}=attention, or to all or GiB"
            )
        if compiled and type(getattr(half, "o_proj", None)) is nn.Linear:
            leave_out(half.o_proj)  # where recomputing the half stops
        self._context_fn = context_fn
        self._forward = compile_part(half.forward, dynamic) if compiled else half.forward
        self._alone = False
        half.forward = torch.compiler.disable(self._run, recursive=False)

    @contextmanager
    def recomputed(self) -> Iterator[None]:
        """Forwards in the block hold the input of the half, and of what it computes attention's output alone."""
        self._alone = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._alone = False

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._alone:
            return self._forward(*args, **kwargs)
        if "hidden_states" in kwargs:  # what a checkpoint is given by name it holds where nothing can count it
            args = (kwargs.pop("hidden_states"), *args)
        options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": self._context_fn}
        return checkpoint(self._forward, *args, **options, **kwargs)
