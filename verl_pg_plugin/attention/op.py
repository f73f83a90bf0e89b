"""The attention op: one autograd function that runs the calls of an attention plan on any kernel.

Gradients are summed in float32, in a fixed order, and rounded once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_pg_plugin.attention.cache import CacheAccess, CacheKey
from verl_pg_plugin.attention.kernels import Kernel
from verl_pg_plugin.attention.passes import Varlen
from verl_pg_plugin.attention.plan import AttentionPlan, VarlenCall


@dataclass(frozen=True)
class AttentionOptions:
    """Attention options of one layer."""

    softmax_scale: float
    window_size: int = -1  # tokens before a query that it sees; -1 for all
    softcap: float = 0.0  # scores are capped by ``softcap * tanh(score / softcap)``; 0 for no cap
    layer_idx: int = 0
    sinks: Tensor | None = None  # (H,) learned; an additional score of every query, with a value of zero

    @property
    def cache_keys(self) -> tuple[CacheKey, CacheKey]:
        """Cache keys of this layer's keys and values."""
        return CacheKey(self.layer_idx, "k"), CacheKey(self.layer_idx, "v")

    def of(self, problem: Varlen) -> Varlen:
        """Return the problem with this layer's scale, window and softcap."""
        window = self.window_size if problem.causal else -1
        return problem._replace(softmax_scale=self.softmax_scale, window=window, softcap=self.softcap)


class AttentionRecord(Protocol):
    """Attention outputs saved for the recomputation of a checkpointed layer (``engine.activations``)."""

    def computed(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of the next attention call: computed in the forward, read in recomputation."""


def attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    plan: AttentionPlan,
    kernel: Kernel,
    options: AttentionOptions,
    cache: CacheAccess | None = None,
    record: AttentionRecord | None = None,
) -> Tensor:
    """Compute causal attention of T packed tokens over their ancestors and themselves.

    Args:
        v_TGD: may be narrower than keys, as in multi-head latent attention.
        plan: attention plan of the layout for the window of ``options``.
        cache: cache access of a chunk; None outside of split groups.
        record: record of the checkpointed layer, if its activation level saves attention's output.

    Returns:
        (T, H, width of ``v_TGD``) in the dtype of ``q_THD``; float32 under autocast gives autocast's dtype.
    """
    device = q_THD.device.type
    if q_THD.dtype == torch.float32 and torch.is_autocast_enabled(device):
        q_THD = q_THD.to(torch.get_autocast_dtype(device))  # norms in float32; as transformers casts them
    k_TGD, v_TGD = k_TGD.to(q_THD.dtype), v_TGD.to(q_THD.dtype)
    width = v_TGD.shape[-1]
    if width < k_TGD.shape[-1]:
        v_TGD = F.pad(v_TGD, (0, k_TGD.shape[-1] - width))
    if cache is not None:
        for key, x in zip(options.cache_keys, (k_TGD, v_TGD), strict=True):
            cache.publish_values(key, x)
    return TreeAttention.apply(q_THD, k_TGD, v_TGD, options.sinks, plan, kernel, options, cache, record)[..., :width]


class TreeAttention(torch.autograd.Function):
    """Autograd function of ``attend``; saves the output, and the log-sum-exp including the sinks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, own_k: Tensor, own_v: Tensor, sinks: Tensor | None, *others: Any) -> Tensor:
        *ctx.others, record = others
        plan, kernel, options, cache = ctx.others

        def compute() -> tuple[Tensor, Tensor]:
            k, v = _with_cached(options, cache, own_k, own_v)
            results = [kernel.forward(q[p.rows], *p.read(k, v), options.of(p.problem)) for p in plan.forward]
            outs, lses = zip(*results, strict=True)
            out, lse = results[0] if len(results) == 1 else (torch.cat(outs), torch.cat(lses, dim=1))
            if sinks is not None:
                with_sink = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
                out, lse = (out * torch.exp(lse - with_sink).T[..., None]).to(out.dtype), with_sink
            return out, lse

        out, lse = compute() if record is None else record.computed(compute)
        ctx.save_for_backward(q, own_k, own_v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,), (q, own_k, own_v, sinks, out, lse) = grads, ctx.saved_tensors
        plan, kernel, options, cache = ctx.others
        k, v = _with_cached(options, cache, own_k, own_v)
        calls = plan.backward
        # Float32 totals if more than two terms are summed, or terms of other forwards. Otherwise the first call, which
        # has all tokens, writes its gradients.
        if wide := cache is not None or len(calls) > 2 or calls[0].rows != slice(0, len(q)):
            totals = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)]
        else:
            totals = [kernel.empty_gradient(x) for x in (q, k, v)]

        def add(call: VarlenCall, first: bool) -> None:
            """Write the gradients of the first call or add those of another; frees its gathered KV on return."""
            places = call.rows, call.keys, call.keys
            read = q[call.rows], *call.read(k, v)
            parts = [
                total if first and isinstance(place, slice) else kernel.empty_gradient(x)
                for total, place, x in zip(totals, places, read, strict=True)
            ]
            rows = dout[call.rows], *read, out[call.rows], lse[:, call.rows].contiguous()
            kernel.backward(*rows, *parts, options.of(call.problem))
            for total, place, part in zip(totals, places, parts, strict=True):
                if not isinstance(place, slice):
                    place.sum(part, total, add=not first)
                elif not first:
                    total[place] += part

        for i, call in enumerate(calls):
            add(call, first=i == 0 and not wide)
        if cache is not None:
            totals[1:] = map(cache.exchange_gradients, options.cache_keys, totals[1:])
        gradients = (
            total if total.dtype == x.dtype else kernel.empty_gradient(x).copy_(total)
            for total, x in zip(totals, (q, own_k, own_v), strict=True)
        )
        dsinks = None
        if sinks is not None:
            probability_HT = torch.exp(sinks[:, None].to(lse.dtype) - lse)
            dsinks = -(probability_HT * (dout.to(lse.dtype) * out).sum(-1).T).sum(1).to(sinks.dtype)
        return *gradients, dsinks, None, None, None, None, None


def _with_cached(options: AttentionOptions, cache: CacheAccess | None, *own: Tensor) -> Iterable[Tensor]:
    """Return [c cached | T own] keys and values."""
    return own if cache is None or not cache.read else map(cache.with_cached, options.cache_keys, own)
