"""Take over the two functions with which a Gated DeltaNet layer of transformers mixes tokens; no model file changes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl_pg_plugin.attention.context import AttentionContext
from verl_pg_plugin.mixers.gated_delta.convolution import Windows, convolve, plain_convolution
from verl_pg_plugin.mixers.gated_delta.recurrence import Levels, delta_rule_over

GATED_DELTA = "gated_delta"
"""Under this name ``AttentionContext.calls`` counts Gated DeltaNet layers."""

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "chunk_gated_delta_rule"
"""Attributes of transformers' modules; all else in them looks at one row at a time."""


class SharedRowOps:
    """Stands in for both functions of one module, which hands them no keywords of the model's forward.

    The rows of a forward come from the decoder layer's keyword ``prefix_grouper`` instead, by a hook in front of the
    layer; where gradient checkpointing computes a layer again, it runs again.

    Attributes:
        convolution, rule: the module's own functions.
        rows: of the layer's forward that is running.
        convolved: whether they have been through the convolution.
    """

    def __init__(self, module: nn.Module) -> None:
        self.convolution, self.rule = getattr(module, CONVOLUTION), getattr(module, DELTA_RULE)
        self.rows: AttentionContext | None = None
        self.convolved = False

    @torch.compiler.disable
    def enter_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook in front of a decoder layer: remember its rows."""
        self.rows, self.convolved = kwargs.get("prefix_grouper"), False

    @torch.compiler.disable  # index maps differ in every micro-batch
    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Stands in for ``causal_conv1d_fn``: x (1, D, T), weight (D, W) -> (1, D, T), zero at padding rows.

        Raises:
            RuntimeError: the layer has no rows, or is asked for something that shared rows do not have.
        """
        rows, num_rows = self._rows(kwargs)
        convolution = plain_convolution if self.convolution is None else self.convolution
        windows = rows.index(Windows.from_layout, weight.shape[-1], x.device)
        out = convolve(
            x[..., :num_rows],
            windows,
            lambda part: convolution(x=part, weight=weight, bias=bias, activation=activation),
        )
        self.convolved = True
        return F.pad(out, (0, x.shape[-1] - num_rows))

    @torch.compiler.disable
    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Stands in for ``chunk_gated_delta_rule``: (1, T, H, ...) -> (1, T, H, V), zero at padding rows.

        Raises:
            RuntimeError: see ``convolve``; or the module has convolved its rows by other means.
        """
        rows, num_rows = self._rows(kwargs)
        if not self.convolved:
            raise RuntimeError("a Gated DeltaNet layer convolved shared rows by other means than causal_conv1d_fn")
        levels = rows.index(Levels.from_layout, query.device)
        out = delta_rule_over(
            levels,
            self.rule,
            tuple(x[0, :num_rows] for x in (query, key, value, g, beta)),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        return F.pad(rows.mixed(GATED_DELTA, out), (0, 0, 0, 0, 0, query.shape[1] - num_rows)).unsqueeze(0), None

    def _rows(self, kwargs: dict[str, Any]) -> tuple[AttentionContext, int]:
        unsupported = [name for name, setting in kwargs.items() if setting is not None and setting is not False]
        if unsupported:
            raise RuntimeError(
                f"a Gated DeltaNet layer asks for {', '.join(sorted(unsupported))}, which shared rows do not have; "
                "set actor_rollout_ref.actor.use_prefix_grouper=False"
            )
        if self.rows is None or self.rows.layout is None:
            raise RuntimeError(
                "a Gated DeltaNet layer was made to mix shared rows and got no layout of any; set "
                "actor_rollout_ref.actor.use_prefix_grouper=False"
            )
        return self.rows, self.rows.layout.num_tokens


def install(model: nn.Module) -> int:
    """Let every Gated DeltaNet layer of an unwrapped transformers model mix shared rows; returns how many there are."""
    found = 0
    for layer in model.modules():
        for module in layer.children():
            if hasattr(module, CONVOLUTION) and hasattr(module, DELTA_RULE):
                ops = SharedRowOps(module)
                setattr(module, CONVOLUTION, ops.convolve)
                setattr(module, DELTA_RULE, ops.delta_rule)
                layer.register_forward_pre_hook(ops.enter_layer, with_kwargs=True)
                found += 1
    return found
