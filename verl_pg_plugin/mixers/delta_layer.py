"""Gated DeltaNet (https://arxiv.org/abs/2412.06464) over packed tokens: a short convolution, then a recurrence.

``convolution.py`` and ``recurrence.py`` compute the two. This file replaces functions that transformers' layers call.
Under Ulysses, all-to-alls around each trade tokens for channels or heads, which are independent. Chunks of a split
group publish states and the convolution's last inputs at every position where a later chunk continues.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl_pg_plugin import upstream
from verl_pg_plugin.attention.cache import CacheAccess
from verl_pg_plugin.attention.context import ForwardContext
from verl_pg_plugin.attention.interface import WITHOUT_EFFECT
from verl_pg_plugin.issue import SHARING_OFF
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.mixers.convolution import Windows, convolve, plain_convolution
from verl_pg_plugin.mixers.recurrence import Depth, Depths, run_by_depth

GATED_DELTA = "gated_delta"
CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "chunk_gated_delta_rule"
"""Attributes of transformers' modules; the rest of a module acts on single tokens."""
DELTA_RULE_OF_FILE = f"torch_{DELTA_RULE}"
"""Name of the delta rule since transformers 5.15, where both are functions of the model's file."""


DeltaRule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""fla's or transformers' ``chunk_gated_delta_rule``."""


def delta_rule_over(
    depths: Depths,
    rule: DeltaRule,
    tensors: tuple[torch.Tensor, ...],
    cache: CacheAccess | None = None,
    layer: int = 0,
    **options: Any,
) -> torch.Tensor:
    """Return (T, H, V), the gated delta rule within each sequence; ``rule`` computes one depth.

    ``tensors`` are (T, H, K) queries and keys, (T, H, V) values, (T, H) log decay and (T, H) beta. ``options`` go to
    ``rule``.
    """
    # fla's kernels take varlen segments, transformers' fallback a padded batch: zero tokens do not change a state.
    is_varlen = "cu_seqlens" in inspect.signature(rule).parameters

    def delta_rule(
        depth: Depth, part: tuple[torch.Tensor, ...], state: torch.Tensor | None, is_read: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if is_varlen:
            q, k, v, g, beta = (x.unsqueeze(0) for x in part)
            options["cu_seqlens"] = depth.cu_seqlens
        else:
            q, k, v, g, beta = map(depth.padded, part)
        out, state = rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=is_read, **options)
        return out.squeeze(0) if is_varlen else depth.unpadded(out), state

    return run_by_depth(depths, delta_rule, tensors, cache, layer)


class _LayerCall:
    """One call of a Gated DeltaNet layer; like ``ForwardContext``, no dataclass."""

    def __init__(self, context: ForwardContext, layer_idx: int) -> None:
        self.context, self.layer_idx = context, layer_idx
        self.convolved = False


class GatedDeltaLayer:
    """Replaces both functions of a module; they read their call from the keyword ``prefix_grouper``.

    Up to transformers 5.14 modules pass no keywords: ``call`` is set while the decoder layer runs.
    """

    def __init__(self, convolution: Any, rule: DeltaRule) -> None:
        self.convolution, self.rule = convolution or plain_convolution, rule
        self.call: _LayerCall | None = None

    @torch.compiler.disable  # index maps differ in every micro-batch
    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Replace ``causal_conv1d_fn``: x (1, D, T), weight (D, W) -> (1, D, T), zero at padding."""
        call, layout = self._packed(kwargs)
        context, num_tokens = call.context, layout.num_tokens
        x = context.to_heads(x.transpose(1, 2)).transpose(1, 2)
        weight, bias = context.own_heads(weight), None if bias is None else context.own_heads(bias)
        windows = context.index(Windows.from_layout, weight.shape[-1], x.device)
        plain = functools.partial(self.convolution, weight=weight, bias=bias, activation=activation)
        out = convolve(x[..., :num_tokens], windows, plain, context.cache, call.layer_idx)
        out = F.pad(out, (0, x.shape[-1] - num_tokens))
        call.convolved = True
        return context.to_tokens(out.transpose(1, 2)).transpose(1, 2)

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
        """Replace ``chunk_gated_delta_rule``: (1, T, H, ...) -> (1, T, H, V), zero at padding."""
        call, layout = self._packed(kwargs)
        context, num_tokens = call.context, layout.num_tokens
        if not call.convolved:
            raise RuntimeError("a Gated DeltaNet layer did not call causal_conv1d_fn on packed tokens")
        depths = context.index(Depths.from_layout, query.device)
        tensors = [context.to_heads(x) for x in (query, key, value, g, beta)]
        own = tuple(x[0, :num_tokens] for x in tensors)
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        out = delta_rule_over(depths, self.rule, own, context.cache, call.layer_idx, **options)
        num_padding = tensors[0].shape[1] - num_tokens
        out = F.pad(context.mixed(GATED_DELTA, out), (0, 0, 0, 0, 0, num_padding)).unsqueeze(0)
        return context.to_tokens(out), None

    def _packed(self, kwargs: dict[str, Any]) -> tuple[_LayerCall, PackedLayout]:
        call: _LayerCall | None = kwargs.pop("prefix_grouper", self.call)
        passed = {name for name, value in kwargs.items() if value is not None and value is not False}
        if unsupported := ", ".join(sorted(passed - WITHOUT_EFFECT)):
            raise RuntimeError(f"packed Gated DeltaNet does not implement {unsupported}; {SHARING_OFF}")
        if call is None or call.context.layout is None:
            raise RuntimeError(f"a packed Gated DeltaNet layer got no layout; {SHARING_OFF}")
        return call, call.context.layout


def install(model: nn.Module) -> None:
    """Make every Gated DeltaNet layer of an unwrapped model mix packed tokens."""
    for layer in model.modules():
        for module in layer.children():
            if hasattr(module, CONVOLUTION) and hasattr(module, DELTA_RULE):
                ops = GatedDeltaLayer(getattr(module, CONVOLUTION), getattr(module, DELTA_RULE))
                setattr(module, CONVOLUTION, ops.convolve)
                setattr(module, DELTA_RULE, ops.delta_rule)
                _set_call_within(layer, ops, module.layer_idx)
            elif type(module).__name__.endswith("GatedDeltaNet"):  # ``calls`` shows a module that is no such layer
                install_in_file(sys.modules[type(module).__module__])
                module.register_forward_pre_hook(_name_layer, with_kwargs=True)


def _set_call_within(layer: nn.Module, ops: GatedDeltaLayer, layer_idx: int) -> None:
    """Set the call of ``ops`` while a decoder layer runs; clear it on errors too."""

    @torch.compiler.disable
    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context = kwargs.get("prefix_grouper")
        ops.call = None if context is None else _LayerCall(context, layer_idx)

    @torch.compiler.disable
    def leave(*_: Any) -> None:
        ops.call = None

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(leave, always_call=True)


@torch.compiler.disable
def _name_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace the context by a call with the module's layer index."""
    context = kwargs.get("prefix_grouper")
    return None if context is None else (args, {**kwargs, "prefix_grouper": _LayerCall(context, module.layer_idx)})


@functools.cache  # replace a file's functions once in a process
def install_in_file(modeling: Any) -> None:
    """Replace both functions of a model's file for all its layers; calls without ``prefix_grouper`` run as before.

    transformers' function may call fla's; its signature does not show which, so the rule is selected here.
    """
    from transformers.utils import is_flash_linear_attention_available

    if is_flash_linear_attention_available():
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    else:
        rule = getattr(modeling, DELTA_RULE_OF_FILE, None)
    ops = GatedDeltaLayer(getattr(modeling, CONVOLUTION, None), rule)
    upstream.run_when_shared(modeling, CONVOLUTION, ops.convolve, "weight", "bias", "activation")
    upstream.run_when_shared(modeling, DELTA_RULE_OF_FILE, ops.delta_rule, "query", "key", "value", "g", "beta")
