"""The rows of one forward and how they attend: what a model's layers are handed as ``prefix_grouper``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from verl_pg_plugin.attention.kernels.selection import by_itself
from verl_pg_plugin.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionOptions:
    """What one layer asks of attention.

    Attributes:
        softmax_scale, window_size, softcap: see ``VarlenAttention``.
        layer_idx: place of the layer in the model.
        sinks: (H,) learned attention sinks of the heads of ``query``, if the layer has any.
    """

    softmax_scale: float
    window_size: int = -1
    softcap: float = 0.0
    layer_idx: int = 0
    sinks: torch.Tensor | None = None

    @property
    def of_kernel(self) -> dict[str, Any]:
        """Keywords of a ``VarlenAttention``."""
        sinks = {} if self.sinks is None else {"sinks_H": self.sinks}
        return {"softmax_scale": self.softmax_scale, "window_size": self.window_size, "softcap": self.softcap, **sinks}


class SharedRows(ABC):
    """Made by the engine for one forward, which a layer may run more than once (gradient checkpointing).

    No dataclass: torch 2.11 takes frozen dataclasses apart where compiled code hands them on, and would compile anew
    for every size of the tensors inside.

    Attributes:
        layout: what the rows are; None where a model made them from a padded batch.
        calls: layers that mixed these rows so far, by the name of their mixer. The engine compares it with the model,
            so a layer that mixes tokens by other means is an error and not a wrong number.
        around: calls attention, given it and its three tensors, in a checkpoint of its own where a layer is kept; see
            ``engine.kept_layers``.
    """

    def __init__(self, layout: Layout | None) -> None:
        self.layout = layout
        self.calls: Counter[str] = Counter()
        self.around: Callable[..., torch.Tensor] = by_itself
        self._indices: dict[tuple[Hashable, ...], Any] = {}

    @abstractmethod
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Causal attention in which rows see their own sequences only.

        Args:
            query: (B, H, T, D), rotary embedding applied.
            key, value: (B, G, T, D) of the same rows; values may be narrower.

        Returns:
            (B, T, H, D) in the dtype of ``query`` and the width of ``value``.
        """

    def rounded(self, out: torch.Tensor) -> torch.Tensor:
        """What a layer computed, as it is; verify mode moves it by rounding, see ``engine.steps.token_comparison``."""
        return out

    def index(self, make: Callable[..., T], *args: Hashable) -> T:
        """What ``make`` derives from the layout, derived once per forward and not once per layer.

        Args:
            make: takes the layout, then ``args``.

        Raises:
            RuntimeError: these rows have no layout.
        """
        if self.layout is None:
            raise RuntimeError("rows that a model packed by itself have no layout; only attention can mix them")
        key = (make, *args)
        if key not in self._indices:
            self._indices[key] = make(self.layout, *args)
        return self._indices[key]
