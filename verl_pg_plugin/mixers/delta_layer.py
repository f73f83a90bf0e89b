"""Gated DeltaNet (https://arxiv.org/abs/2412.06464) over packed tokens: a short convolution, then a recurrence.

*Convolution.* All packed tokens go through one ordinary convolution. The first ``width - 1`` outputs of a segment are
wrong, since their inputs cross the segment's start. They are recomputed in windows of the ancestors' last tokens
followed by the segment's first, and replace the wrong ones.

*Recurrence.* A segment starts from its parent's final state. Segments of equal depth are independent, so they are the
sequences of one varlen call with initial states: a GRPO group takes two calls.

Both replace a function that transformers' layers call; no model file changes. Under Ulysses, all-to-alls around each
trade tokens for channels or heads, which are independent. Chunks of a split group publish states and the convolution's
last inputs at every position where a later chunk continues.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from verl_pg_plugin import upstream
from verl_pg_plugin.attention.cache import CacheAccess, CacheKey, StateExchange
from verl_pg_plugin.attention.context import ForwardContext
from verl_pg_plugin.attention.gather import Gather, gather_tokens
from verl_pg_plugin.attention.interface import WITHOUT_EFFECT
from verl_pg_plugin.issue import SHARING_OFF
from verl_pg_plugin.layout import IntArray, PackedLayout
from verl_pg_plugin.transfer import to_device

STATE, INPUTS = "state", "inputs"
GATED_DELTA = "gated_delta"
CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "chunk_gated_delta_rule"
"""Attributes of transformers' modules; the rest of a module acts on single tokens."""
DELTA_RULE_OF_FILE = f"torch_{DELTA_RULE}"
"""Name of the delta rule since transformers 5.15, where both are functions of the model's file."""


@dataclass(frozen=True)
class Windows:
    """Windows of 2(W - 1) tokens around the start of each of the S segments."""

    tails: StateExchange | None  # the W - 1 inputs before each position that is read from the cache or published
    num_read: int  # tokens that are read from the cache; they precede the own tokens
    gather: Gather  # tokens of all windows, concatenated
    missing: torch.Tensor  # (S, 2(W - 1)) bool, no token: before a sequence, or after the end of a short segment
    fixed: torch.Tensor  # (F,) int64 own tokens whose output is replaced
    place: torch.Tensor  # (F,) int64 their positions in the concatenated windows

    @classmethod
    def from_layout(cls, layout: PackedLayout, width: int, device: torch.device) -> "Windows":
        """Return the windows of a convolution of ``width`` tokens."""
        reach = width - 1
        offset = np.arange(-reach, reach)
        place = layout.segment_start[:, None] + offset  # index into the keys of each segment
        ends = layout.segment_start + np.diff(layout.cu_seqlens_q)
        missing = (place < 0) | (place >= ends[:, None])
        resumed_at, start = layout.resumed_at, layout.num_cached_keys  # number of cached keys of each segment
        num_read = len(resumed_at) * reach

        def tokens_at(segment: IntArray, place: IntArray) -> IntArray:
            """Return indices into [cached tails | own tokens] of places in segments; arbitrary for missing ones."""
            key = layout.kv_index[layout.cu_seqlens_k[segment, None] + np.maximum(place, 0)].astype(np.int64)
            in_tail = (np.searchsorted(resumed_at, start[segment, None]) + 1) * reach + key - start[segment, None]
            return np.where(key < layout.num_cached, np.maximum(in_tail, 0), key - layout.num_cached + num_read)

        tokens = tokens_at(np.arange(len(place)), np.where(missing, 0, place))
        segment, column = np.nonzero(~missing & (offset >= 0))
        publish = layout.published_states
        last = layout.publish[publish - layout.publish_start - 1]  # the token before each
        ends_in = np.searchsorted(layout.cu_seqlens_q, last, side="right") - 1
        last_inputs = tokens_at(ends_in, publish[:, None] + np.arange(-reach, 0))
        return cls(
            tails=StateExchange.of(resumed_at, publish, last_inputs, device),
            num_read=num_read,
            gather=Gather(to_device(tokens.reshape(-1), device, torch.int32), num_read + layout.num_tokens),
            missing=to_device(missing, device, torch.bool),
            fixed=to_device(tokens[segment, column] - num_read, device),
            place=to_device(segment * 2 * reach + column, device),
        )


def convolve(
    x: torch.Tensor,
    windows: Windows,
    convolution: Callable[[torch.Tensor], torch.Tensor],
    cache: CacheAccess | None = None,
    layer: int = 0,
) -> torch.Tensor:
    """Convolve (1, D, T) packed tokens, each within its own sequence.

    ``convolution`` maps (B, D, L) to (B, D, L), causal and padded with zeros.
    """
    if cache is not None:
        x_TD, _ = cache.exchange_states(CacheKey(layer, INPUTS), x.squeeze(0).transpose(0, 1), windows.tails)
        x = x_TD[windows.num_read :].transpose(0, 1).unsqueeze(0)
    plain = convolution(x)
    # Viewed after the convolution: autograd then adds this gradient first, and the sum gets its (T, D) strides. With
    # the convolution's (D, T) strides, the projection's backward takes six times as long if T is odd.
    if cache is None:
        x_TD = x.squeeze(0).transpose(0, 1)
    gathered = gather_tokens(x_TD, windows.gather)
    window_SLD = gathered.view(*windows.missing.shape, -1).masked_fill(windows.missing.unsqueeze(-1), 0.0)
    edges_KD = convolution(window_SLD.transpose(1, 2)).transpose(1, 2).flatten(0, 1)
    return plain.index_copy(2, windows.fixed, edges_KD.index_select(0, windows.place).T.unsqueeze(0))


def plain_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Replace the package causal-conv1d; weight (D, W). As in transformers, any activation is SiLU."""
    if x.is_cuda:  # fla's is faster and rounds once, after the activation
        from fla.modules.convolution import causal_conv1d

        out, _ = causal_conv1d(x.transpose(1, 2), weight, bias, activation=None if activation is None else "silu")
        return out.transpose(1, 2)
    out = F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[1])
    return out if activation is None else F.silu(out)


DeltaRule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""fla's or transformers' ``chunk_gated_delta_rule``."""


@dataclass(frozen=True)
class Depth:
    """The N segments of one depth."""

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor  # (N+1,) int64
    num_children: torch.Tensor | None  # (M,) int64 of the M segments above, in whose order they are; None for roots
    publish: StateExchange | None  # segments at whose end another chunk continues


@dataclass(frozen=True)
class Depths:
    """T packed tokens sorted by the depth of their segments."""

    depths: list[Depth]  # from the roots down
    starts: StateExchange | None  # of roots that continue cached tokens; these roots come first
    by_depth: Gather | None = None  # sorts tokens by depth; None if they are sorted
    back: Gather | None = None  # the inverse

    @classmethod
    def from_layout(cls, layout: PackedLayout, device: torch.device) -> "Depths":
        """Sort segments by depth, cut where states are published; siblings are consecutive in a layout."""
        publish = layout.published_states
        ends = layout.publish[publish - layout.publish_start - 1] + 1
        bounds = np.union1d(layout.cu_seqlens_q, ends)
        whole = np.searchsorted(layout.cu_seqlens_q, bounds[:-1], side="right") - 1  # the segment of each piece
        last_piece = np.searchsorted(bounds, layout.cu_seqlens_q[1:]) - 1
        of_whole = layout.segment_parent[whole]
        begins = bounds[:-1] == layout.cu_seqlens_q[whole]
        previous = np.arange(-1, len(whole) - 1)
        parents = np.where(begins, np.where(of_whole >= 0, last_piece[of_whole], -1), previous)
        lengths = np.diff(bounds)
        position = layout.segment_start[whole] + bounds[1:] - layout.cu_seqlens_q[whole]
        depth = np.zeros(len(parents), dtype=np.int64)
        for segment, parent in enumerate(parents.tolist()):  # parents come first
            depth[segment] = depth[parent] + 1 if parent >= 0 else 0
        depths, above, nothing = [], None, np.zeros(0, dtype=np.int64)
        for d in range(int(depth.max()) + 1):
            members = np.flatnonzero(depth == d)
            num_children = None
            if above is not None:
                counted = np.bincount(np.searchsorted(above, parents[members]), minlength=len(above))
                num_children = to_device(counted, device)
            ending = np.flatnonzero(np.isin(bounds[members + 1], ends))
            published = StateExchange.of(nothing, position[members[ending]], ending[:, None], device)
            cu_seqlens = to_device(np.cumsum([0, *lengths[members]]), device)
            depths.append(Depth(tuple(lengths[members].tolist()), cu_seqlens, num_children, published))
            above = members
        roots = layout.segment_start[layout.segment_parent < 0]
        assert roots[: np.count_nonzero(roots)].all(), "roots that continue cached tokens come first"
        starts = StateExchange.of(roots[roots > 0], nothing, nothing[:, None], device)
        order = np.argsort(np.repeat(depth, lengths), kind="stable")
        if (np.diff(order) == 1).all():
            return cls(depths, starts)
        sorts = (to_device(places, device, torch.int32) for places in (order, np.argsort(order, kind="stable")))
        return cls(depths, starts, *(Gather(places, layout.num_tokens) for places in sorts))


class _RepeatState(torch.autograd.Function):
    """Give each child its parent's float32 state; the backward sums over children in a fixed order."""

    @staticmethod
    def forward(ctx: Any, state: torch.Tensor, num_children: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(num_children)
        return state.repeat_interleave(num_children, dim=0, output_size=total)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (num_children,) = ctx.saved_tensors
        total = torch.segment_reduce(grads[0].contiguous(), "sum", lengths=num_children, axis=0, unsafe=True)
        return total, None, None


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
    if depths.by_depth is not None:
        tensors = tuple(gather_tokens(x, depths.by_depth) for x in tensors)
    sizes = [sum(depth.lengths) for depth in depths.depths]
    parts = zip(*(x.split(sizes) for x in tensors), strict=True)
    # fla's kernels take varlen segments, transformers' fallback a padded batch: zero tokens do not change a state.
    is_varlen = "cu_seqlens" in inspect.signature(rule).parameters
    outs = []
    state = None
    key = CacheKey(layer, STATE)
    if cache is not None and depths.starts is not None:
        cached = cache.state(key._replace(position=depths.starts.read[0]))
        zeros = cached.new_zeros(len(depths.depths[0].lengths) - len(depths.starts.read), *cached.shape[1:])
        state, _ = cache.exchange_states(key, zeros.requires_grad_(torch.is_grad_enabled()), depths.starts)
    for depth, part in zip(depths.depths, parts, strict=True):
        if depth.num_children is not None:
            state = _RepeatState.apply(state, depth.num_children, len(depth.lengths))
        if is_varlen:
            q, k, v, g, beta = (x.unsqueeze(0) for x in part)
            options["cu_seqlens"] = depth.cu_seqlens
        else:
            q, k, v, g, beta = (pad_sequence(x.split(depth.lengths), batch_first=True) for x in part)
        is_read = depth is not depths.depths[-1] or depth.publish is not None
        out, state = rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=is_read, **options)
        if cache is not None and state is not None:
            state, out = cache.exchange_states(key, state, depth.publish, passthrough=out)
        lengths = (out.shape[1],) if is_varlen else depth.lengths
        outs += [sequence[:length] for sequence, length in zip(out, lengths, strict=True)]
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return out if depths.back is None else gather_tokens(out, depths.back)


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
