"""Forward and backward of every attention kernel with one signature.

    forward(q_THD, k_KGD, v_KGD, problem) -> out_THD, lse_HT
    backward(dout_THD, q_THD, k_KGD, v_KGD, out_THD, lse_HT, dq_THD, dk_KGD, dv_KGD, problem)

T query tokens, K key tokens, H query heads, G key/value heads (a divisor of H), D head dim. ``lse`` is the log-sum-exp
of the scores, float32 or wider. A backward writes ``dq``, ``dk`` and ``dv``, whose heads may have any stride. ``out``
and ``lse`` may be those of a softmax over more keys: then it computes the gradients through the given K (as in ring
attention, https://arxiv.org/abs/2310.01889). Gradients of queries without keys and of keys without queries are zero.

Each function named in ``kernels.KERNELS`` imports its kernel and returns the two passes.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., None]
Passes = tuple[Forward, Backward]
Gradients = tuple[Tensor, ...]


class Varlen(NamedTuple):
    """S segments packed along the first dimension, with the attention options."""

    cu_seqlens_q: Tensor  # (S+1,) int32 on the device of the queries
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float = 1.0
    causal: bool = True  # the mask is aligned bottom-right: a segment's last query sees its last key
    window: int = -1  # keys to the left of its own that a causal query sees; -1 for all
    softcap: float = 0.0  # scores become ``softcap * tanh(score / softcap)``; 0 for no cap

    @property
    def window_size(self) -> tuple[int, int]:
        """Left and right window as in flash-attn; -1 for no bound."""
        return (self.window, 0) if self.window >= 0 else (-1, -1)

    def keywords(self, no_window: int | None = -1) -> dict[str, Any]:
        """Return the fields as keyword arguments of flash-attn."""
        left, right = self.window_size if self.window >= 0 else (no_window, no_window)
        named = {**self._asdict(), "window_size_left": left, "window_size_right": right}
        del named["window"]
        return named


def deterministic() -> bool:
    """True if torch's switch is on, or the environment variable that transformers and verl read."""
    by_variable = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    return by_variable or torch.are_deterministic_algorithms_enabled()


@cache
def flash_attn_2() -> Passes:
    """PyPI ``flash-attn``."""
    import flash_attn  # noqa: F401 - registers the operators

    run_forward = torch.ops.flash_attn._flash_attn_varlen_forward
    run_backward = torch.ops.flash_attn._flash_attn_varlen_backward

    def forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
        return run_forward(q, k, v, dropout_p=0.0, **p.keywords())[:2]

    def backward(dout: Tensor, *arguments: Any) -> None:
        *tensors, p = arguments
        run_backward(dout, *tensors, dropout_p=0.0, alibi_slopes=None, deterministic=deterministic(), **p.keywords())

    return forward, backward


@cache
def flash_attn_3() -> Passes:
    """``hopper`` in flash-attention's repository."""
    from flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    # Earlier builds have one argument for both sides of a window.
    signature = inspect.signature(getattr(_flash_attn_forward, "_init_fn", _flash_attn_forward))
    if "window_size_left" not in signature.parameters:
        raise ImportError("an early build, without window_size_left")

    def forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
        return _flash_attn_forward(q, k, v, **p.keywords())[:2]

    def backward(dout: Tensor, *tensors: Any) -> None:
        q, k, v, out, lse, dq, dk, dv, p = tensors
        if not p.causal:  # the kernel may skip segments without keys or queries
            for gradient in (dq, dk, dv):
                gradient.zero_()
        bounds = (p.cu_seqlens_q, p.cu_seqlens_k, None, None, p.max_seqlen_q, p.max_seqlen_k)
        options = (p.softmax_scale, p.causal, *p.window_size, p.softcap, deterministic())
        _flash_attn_backward(dout, q, k, v, out, lse, *bounds, dq, dk, dv, *options)

    return forward, backward


@cache
def flash_attn_4() -> Passes:
    """PyPI ``flash-attn-4``.

    It compiles for minutes at the first call for each head dim, number of heads, mask and dtype.
    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 caches the result on disk.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    # flash-attn 2.8 ships an early copy in the same folder, without this argument.
    if "max_seqlen_k" not in inspect.signature(_flash_attn_fwd).parameters:
        raise ImportError(
            "flash_attn/cute is the copy that flash-attn 2 ships; "
            "pip install --force-reinstall --no-deps --pre flash-attn-4"
        )

    def forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
        return _flash_attn_fwd(q, k, v, return_lse=True, **p.keywords(None))[:2]

    def backward(dout: Tensor, *tensors: Any) -> None:
        q, k, v, out, lse, dq, dk, dv, p = tensors
        _flash_attn_bwd(q, k, v, out, dout, lse, dq=dq, dk=dk, dv=dv, deterministic=deterministic(), **p.keywords(None))

    return forward, backward


@cache
def torch_varlen() -> Passes:
    """flash-attention 2 in torch >= 2.11, called like ``torch.nn.attention.varlen``; without softcap."""
    run_forward, run_backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward

    def arguments(p: Varlen) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if p.softcap:
            raise NotImplementedError(
                "torch_varlen has no softcap. Fix: install flash-attn and set "
                "++prefix_grouper.attention_kernel=flash_attn_2"
            )
        left, right = p.window_size
        window = {"scale": p.softmax_scale, "window_size_left": left, "window_size_right": right}
        # torch takes either causal or a window.
        return (*p[:4], 0.0, p.causal and p.window < 0), window

    def forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
        if max(q.numel(), k.numel()) >= 2**31:
            # torch 2.11 returns garbage without an error for a million tokens of 32 heads x 128.
            raise RuntimeError(
                f"torch_varlen cannot address {max(q.numel(), k.numel())} elements. Fix: lower "
                "ppo_max_token_len_per_gpu, or install flash-attn and set "
                "++prefix_grouper.attention_kernel=flash_attn_2"
            )
        given, window = arguments(p)
        return run_forward(q, k, v, *given, return_debug_mask=False, **window)[:2]

    def backward(dout: Tensor, *tensors: Any) -> None:
        q, k, v, out, lse, dq, dk, dv, p = tensors
        given, window = arguments(p)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        gradients = run_backward(dout.contiguous(), q, k, v, out, lse, *given, *no_dropout, **window)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)

    return forward, backward


QUERY_CHUNK = 1024
"""Queries whose scores are in memory at once if attention is written out in torch."""


@cache
def sdpa() -> Passes:
    """Exact reference for every device and dtype: torch's flash kernel on a CPU, else written out in torch (slow)."""

    def forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), -torch.inf, dtype=wide)
        run, _, most = _of_segment(q, p)
        for rows, keys in _segments(p, most):
            out[rows], lse[:, rows] = run(q[rows], *_per_query_head(q, k[keys], v[keys]), p)
        return out, lse

    def backward(dout: Tensor, *tensors: Any) -> None:
        q, k, v, out, lse, dq, dk, dv, p = tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        totals = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
        _, run, most = _of_segment(q, p)
        for rows, keys in _segments(p, most):
            parts = run(dout[rows], q[rows], *_per_query_head(q, k[keys], v[keys]), out[rows], lse[:, rows], p)
            for total, where, part in zip(totals, (rows, keys, keys), parts, strict=True):
                total[where] += part.unflatten(1, (total.shape[1], -1)).sum(2)
        for gradient, total in zip((dq, dk, dv), totals, strict=True):
            gradient.copy_(total)

    return forward, backward


def _of_segment(q: Tensor, p: Varlen) -> tuple[Forward, Callable[..., Gradients], int]:
    """Return forward and backward of one segment, and the number of queries per call."""
    if q.device.type == "cpu" and not p.softcap:
        return _cpu_forward, _cpu_backward, p.max_seqlen_q
    return _written_out_forward, _written_out_backward, QUERY_CHUNK


def _segments(p: Varlen, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield the queries, at most ``most``, and keys of each segment that has both; causal ones omit later keys."""
    bounds = zip(p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist(), strict=True)
    for (q0, k0), (q1, k1) in pairwise(bounds):
        for start in range(q0, q1 if k1 > k0 else q0, most):
            stop = min(start + most, q1)
            yield slice(start, stop), slice(k0, k1 - (q1 - stop) * p.causal)


def _per_query_head(q_LHD: Tensor, *of_keys_KGD: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(q_LHD.shape[1] // x.shape[1], dim=1) for x in of_keys_KGD]


def _mask(num_q: int, num_k: int, p: Varlen, like: Tensor) -> Tensor:
    """Causal mask (num_q, num_k): -inf for hidden keys, else 0."""
    mask = like.new_full((num_q, num_k), -torch.inf).triu_(num_k - num_q + 1)
    if p.window >= 0:
        mask += torch.full_like(mask, -torch.inf).tril_(num_k - num_q - p.window - 1)
    return mask


def _cpu_options(q: Tensor, k: Tensor, p: Varlen) -> dict[str, Any]:
    square = p.causal and len(q) == len(k) and p.window < 0
    mask = _mask(len(q), len(k), p, q)[None, None] if p.causal and not square else None
    return {"dropout_p": 0.0, "is_causal": square, "attn_mask": mask, "scale": p.softmax_scale}


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = run(*(x.transpose(0, 1)[None] for x in (q, k, v)), **_cpu_options(q, k, p))
    return out[0].transpose(0, 1), lse[0]


def _cpu_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, p: Varlen) -> Gradients:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    heads_first = (x.transpose(0, 1)[None] for x in (dout, q, k, v, out))
    gradients = run(*heads_first, lse[None].contiguous(), **_cpu_options(q, k, p))
    return tuple(x[0].transpose(0, 1) for x in gradients)


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _scores(q: Tensor, k: Tensor, p: Varlen) -> tuple[Tensor, Tensor | float]:
    """Return scores (H, Q, K), -inf for hidden keys, and the derivative of the cap."""
    scores, slope = torch.einsum("qhd,khd->hqk", q, k) * p.softmax_scale, 1.0
    if p.softcap:
        capped = torch.tanh(scores / p.softcap)
        scores, slope = p.softcap * capped, 1 - capped.square()
    return scores + _mask(len(q), len(k), p, q) if p.causal else scores, slope


def _written_out_forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
    wide_q, wide_k, wide_v = _wide(q, k, v)
    scores, _ = _scores(wide_q, wide_k, p)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v).to(q.dtype), scores.logsumexp(-1)


def _written_out_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, p: Varlen
) -> Gradients:
    dout, q, k, v, out = _wide(dout, q, k, v, out)
    scores, slope = _scores(q, k, p)
    weights = (scores - lse[..., None]).exp()
    dscores = weights * (torch.einsum("qhd,khd->hqk", dout, v) - (dout * out).sum(-1).T[..., None])
    dscores *= slope * p.softmax_scale
    dq, dk = torch.einsum("hqk,khd->qhd", dscores, k), torch.einsum("hqk,qhd->khd", dscores, q)
    return dq, dk, torch.einsum("hqk,qhd->khd", weights, dout)


@cache
@torch.inference_mode(False)
@torch.no_grad()
def softcap_fault(pair: Passes, head_dim: int, device_type: str) -> str:
    """Run a kernel with softcap and return what is wrong, or '' if nothing.

    A flash-attn 2 built without softcap omits the ``tanh`` and multiplies scores by the cap, in stock verl too. Such a
    flash-attn 3 raises. Betas of flash-attn 4 return a wrong dq; later versions raise for some heads and GPUs
    (https://github.com/Dao-AILab/flash-attention/pull/2544).
    """
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    lengths = (3, 200)  # the second is longer than a kernel's block
    drawn = torch.randn(6, sum(lengths), head_dim, generator=torch.Generator().manual_seed(0), device="cpu")
    tensors = [x.transpose(0, 1).contiguous() for x in drawn.to(device_type, dtype).split([2, 1, 1, 2])]
    cu_seqlens = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device_type)
    # Scores have a standard deviation of 3, so the cap changes most of them.
    longest = max(lengths)
    problem = Varlen(cu_seqlens, cu_seqlens, longest, longest, softmax_scale=3 / head_dim**0.5, softcap=2.0)

    def outcome(pair: Passes, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Gradients:
        out, lse = pair[0](q, k, v, problem)
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        pair[1](dout, q, k, v, out, lse, *gradients, problem)
        return out, *gradients

    try:
        results = outcome(pair, *tensors)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # not the kernel's fault
        raise
    except Exception as error:  # builds raise RuntimeError or AssertionError, among others
        return f"does not take capped scores (softcap): {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    expected = outcome(sdpa(), *(x.float() for x in tensors))
    errors = [((got.float() - want).norm() / want.norm()).item() for got, want in zip(results, expected, strict=True)]
    # The error of bf16 is about 0.01, that of a kernel without caps at least 1.8. An error may be nan.
    if all(error < 0.1 for error in errors):
        return ""
    off = ", ".join(f"{error:.0%}" for error in errors)
    return f"does not cap scores (softcap) as it is built: out, dq, dk and dv are off by {off}"
