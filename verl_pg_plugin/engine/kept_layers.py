"""Layers that keep their activations under gradient checkpointing, so that their backward recomputes nothing.

Whole layers and not operators: what a compiled layer saves is decided inside its graphs, where torch's selective
checkpointing does not look, while calling a layer without a checkpoint around it works compiled and eager alike. The
last layers are kept, since they are freed first: when a recomputed layer needs its working memory, they are gone.

Inside a kept layer attention alone is checkpointed, or the half of the layer around it (``engine.attention_half``). Its
kernel's output is kept, as everywhere, and no copies of keys and values, since a prompt is copied for each of its
responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from verl_pg_plugin.config.options import PrefixGrouperOptions
from verl_pg_plugin.engine.attention_half import AttentionHalf
from verl_pg_plugin.engine.compiled_layers import decoder_layers
from verl_pg_plugin.engine.held_bytes import HeldBytes

SavedAttention = Any


class KeptLayers:
    """Decoder layers of one model, each of which a forward may keep.

    Attributes:
        kinds: of each layer, the classes of its parts; layers of one kind hold as much.
        measured: bytes that kept layers held in the last forward that measured them, by the layer's place.
    """

    def __init__(
        self, saved_attention: SavedAttention, layers: list[nn.Module], halves: Sequence[AttentionHalf] = ()
    ) -> None:
        self._saved = saved_attention
        self._halves = halves
        self.kinds = [tuple(type(part).__name__ for part in layer.modules()) for layer in layers]
        self.measured: dict[int, int] = {}
        self._kept: frozenset[int] = frozenset()
        self._measures: frozenset[int] = frozenset()
        self._kernels_own = True
        self._inside = False
        self._held: HeldBytes | None = None

    @classmethod
    def install(cls, module: Any, saved_attention: SavedAttention, options: PrefixGrouperOptions) -> KeptLayers | None:
        """Stand between the layers of a model and the checkpoint around each; call it after ``saved_attention``'s.

        Args:
            options: whose ``compile_layers`` is what has been done to them; with ``keep_activations=mlp`` a kept layer
                computes its attention half again.

        Raises:
            ValueError: a layer has no such half.

        Returns:
            None for a model whose layers are not checkpointed one by one.
        """
        layers = decoder_layers(module)
        if not layers or not all(getattr(layer, "_gradient_checkpointing_func", None) for layer in layers):
            return None
        halves: list[AttentionHalf] = []
        if options.keep_activations == "mlp":
            compiled, dynamic = bool(options.compile_layers), not options.static_rows
            halves = [AttentionHalf(layer, saved_attention.contexts, compiled, dynamic) for layer in layers]
        kept = cls(saved_attention, layers, halves)
        for place, layer in enumerate(layers):
            layer._gradient_checkpointing_func = _Layer(kept, place, layer, layer._gradient_checkpointing_func)
        return kept

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @contextmanager
    def keeping(
        self, layers: frozenset[int], measures: frozenset[int] = frozenset(), kernels_own: bool = True
    ) -> Iterator[None]:
        """Forwards in the block keep what these layers compute.

        Args:
            layers: places of layers.
            measures: those to measure, if they are kept.
            kernels_own: what attention returns is what its kernel returned, which a recomputed layer holds too; else it
                is padded, or came from other ranks.
        """
        before = self._kept, self._measures, self._kernels_own
        self._kept, self._measures, self._kernels_own = layers, measures, kernels_own
        try:
            yield
        finally:
            self._kept, self._measures, self._kernels_own = before

    def attention(self, attend: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """``attend`` as the layer that runs now needs it: in the layer's checkpoint, or in its own in a kept layer."""
        if not self._inside:
            return attend(*tensors)
        contexts = self._saved.contexts
        out = checkpoint(attend, *tensors, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        if self._held is not None and self._kernels_own:
            self._held.leave_out(out)
        return out

    def run(self, layer: _Layer, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """One layer's forward."""
        if layer.place not in self._kept:
            return layer.recomputed(call, *args)
        self._inside = torch.is_grad_enabled() and not self._halves
        half = self._halves[layer.place].recomputed() if self._halves else nullcontext()
        try:
            with half:
                if layer.place not in self._measures or not torch.is_grad_enabled():
                    return call(*args)
                given = pytree.tree_leaves([args, getattr(call, "keywords", {})])
                self._held = HeldBytes(layer.module, given)
                with self._held.counting():
                    out = call(*args)
            self.measured[layer.place] = self._held.total
            return out
        finally:
            self._inside, self._held = False, None


class _Layer:
    """What a layer calls to be checkpointed: ``torch.utils.checkpoint.checkpoint`` or ``KeptLayers.run``."""

    def __init__(self, kept: KeptLayers, place: int, module: nn.Module, recomputed: Callable[..., Any]) -> None:
        self.kept, self.place, self.module, self.recomputed = kept, place, module, recomputed

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        return self.kept.run(self, call, args)
