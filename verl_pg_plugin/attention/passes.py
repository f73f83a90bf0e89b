"""The two passes of every attention kernel behind one signature.

    forward(q_THD, k_KGD, v_KGD, problem) -> out_THD, lse_HT
    backward(dout_THD, q_THD, k_KGD, v_KGD, out_THD, lse_HT, dq_THD, dk_KGD, dv_KGD, problem)

T query tokens, K key tokens, H query heads, G key/value heads (a divisor of H), D head dim. ``lse`` is the log-sum-exp
of the scores, float32 or wider. A backward fills ``dq``, ``dk`` and ``dv``, in which the heads of a token need not
follow each other. Given ``out`` and ``lse`` of a softmax over more keys than K, it computes the gradients through these
K (the identity behind ring attention, https://arxiv.org/abs/2310.01889). Gradients of queries without keys and of keys
without queries are zero.

A function named as in ``kernels.KERNELS`` imports that kernel and returns its passes, the same at every call.
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
    """S segments packed along the first dimension, and how their scores are made."""

    cu_seqlens_q: Tensor  # (S+1,) int32 on the device of the queries
    cu_seqlens_k: Tensor
    max_seqlen_q: int  # tokens of the longest segment
    max_seqlen_k: int
    softmax_scale: float = 1.0  # multiplies the scores
    causal: bool = True  # a query sees keys up to its own; a segment's last query is aligned with its last key
    window: int = -1  # keys that a query of a causal problem sees besides its own, to the left; -1 for all
    softcap: float = 0.0  # scores become ``softcap * tanh(score / softcap)``; 0 switches it off

    @property
    def window_size(self) -> tuple[int, int]:
        """Left and right, as flash-attn counts them; -1 for no bound."""
        return (self.window, 0) if self.window >= 0 else (-1, -1)

    def keywords(self, no_window: int | None = -1) -> dict[str, Any]:
        """By the names that every flash-attn has for them."""
        left, right = self.window_size if self.window >= 0 else (no_window, no_window)
        named = {**self._asdict(), "window_size_left": left, "window_size_right": right}
        del named["window"]
        return named


def deterministic() -> bool:
    """Asked for as of transformers and verl, or by torch's own switch."""
    asked = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    return asked or torch.are_deterministic_algorithms_enabled()


@cache
def flash_attn_2() -> Passes:
    """PyPI ``flash-attn``."""
    import flash_attn  # noqa: F401 - it registers its operators

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
    """``hopper`` of flash-attention."""
    from flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    # Earlier builds, whose passes are no operators yet, take both sides of a window as one.
    signature = inspect.signature(getattr(_flash_attn_forward, "_init_fn", _flash_attn_forward))
    if "window_size_left" not in signature.parameters:
        raise ImportError("an early build, without window_size_left")

    def forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
        return _flash_attn_forward(q, k, v, **p.keywords())[:2]

    def backward(dout: Tensor, *tensors: Any) -> None:
        q, k, v, out, lse, dq, dk, dv, p = tensors
        if not p.causal:  # it need not write where a segment has no keys or no queries
            for gradient in (dq, dk, dv):
                gradient.zero_()
        bounds = (p.cu_seqlens_q, p.cu_seqlens_k, None, None, p.max_seqlen_q, p.max_seqlen_k)
        options = (p.softmax_scale, p.causal, *p.window_size, p.softcap, deterministic())
        _flash_attn_backward(dout, q, k, v, out, lse, *bounds, dq, dk, dv, *options)

    return forward, backward


@cache
def flash_attn_4() -> Passes:
    """PyPI ``flash-attn-4``.

    Compiled when first called, for minutes, once for each combination of head dim, heads, mask and dtype;
    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps that on disk.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    # flash-attn 2.8 ships an early copy in the same folder, which has no such argument.
    if "max_seqlen_k" not in inspect.signature(_flash_attn_fwd).parameters:
        raise ImportError(
            "flash_attn/cute holds the copy that flash-attn 2 brings along; "
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
    """flash-attention 2 inside torch >= 2.11, as ``torch.nn.attention.varlen`` calls it; without softcap."""
    run_forward, run_backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward

    def arguments(p: Varlen) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if p.softcap:
            raise NotImplementedError(
                "torch_varlen has no softcap; install flash-attn and set ++prefix_grouper.attention_kernel=flash_attn_2"
            )
        left, right = p.window_size
        window = {"scale": p.softmax_scale, "window_size_left": left, "window_size_right": right}
        # Either causal or with a window, which ends at the query.
        return (*p[:4], 0.0, p.causal and p.window < 0), window

    def forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
        if max(q.numel(), k.numel()) >= 2**31:
            # Measured on torch 2.11: one million tokens of 32 heads x 128 gave garbage and no error.
            raise RuntimeError(
                f"torch_varlen cannot address {max(q.numel(), k.numel())} elements; lower ppo_max_token_len_per_gpu, "
                "or install flash-attn and set ++prefix_grouper.attention_kernel=flash_attn_2"
            )
        given, window = arguments(p)
        return run_forward(q, k, v, *given, return_debug_mask=False, **window)[:2]

    def backward(dout: Tensor, *tensors: Any) -> None:
        q, k, v, out, lse, dq, dk, dv, p = tensors
        given, window = arguments(p)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        found = run_backward(dout.contiguous(), q, k, v, out, lse, *given, *no_dropout, **window)
        for gradient, part in zip((dq, dk, dv), found, strict=True):
            gradient.copy_(part)

    return forward, backward


QUERY_CHUNK = 1024
"""Queries whose scores are held at once where attention is written out."""


@cache
def sdpa() -> Passes:
    """Exact on every device and in every dtype. On a CPU torch's flash kernel, elsewhere written out, which is slow."""

    def forward(q: Tensor, k: Tensor, v: Tensor, p: Varlen) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), -torch.inf, dtype=wide)
        run, _, most = _of_segment(q, p)
        for rows, keys in _segments(p, most):
            out[rows], lse[:, rows] = run(q[rows], *_of_query_heads(q, k[keys], v[keys]), p)
        return out, lse

    def backward(dout: Tensor, *tensors: Any) -> None:
        q, k, v, out, lse, dq, dk, dv, p = tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        totals = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
        _, run, most = _of_segment(q, p)
        for rows, keys in _segments(p, most):
            found = run(dout[rows], q[rows], *_of_query_heads(q, k[keys], v[keys]), out[rows], lse[:, rows], p)
            for total, where, part in zip(totals, (rows, keys, keys), found, strict=True):
                total[where] += part.unflatten(1, (total.shape[1], -1)).sum(2)
        for gradient, total in zip((dq, dk, dv), totals, strict=True):
            gradient.copy_(total)

    return forward, backward


def _of_segment(q: Tensor, p: Varlen) -> tuple[Forward, Callable[..., Gradients], int]:
    """The passes of one segment, and how many of its queries they take at once."""
    if q.device.type == "cpu" and not p.softcap:
        return _cpu_forward, _cpu_backward, p.max_seqlen_q
    return _written_out_forward, _written_out_backward, QUERY_CHUNK


def _segments(p: Varlen, most: int) -> Iterator[tuple[slice, slice]]:
    """Rows and keys of those that have both, ``most`` queries at once; of a causal one the keys that these see."""
    bounds = zip(p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist(), strict=True)
    for (q0, k0), (q1, k1) in pairwise(bounds):
        for start in range(q0, q1 if k1 > k0 else q0, most):
            stop = min(start + most, q1)
            yield slice(start, stop), slice(k0, k1 - (q1 - stop) * p.causal)


def _of_query_heads(q_LHD: Tensor, *of_keys_KGD: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(q_LHD.shape[1] // x.shape[1], dim=1) for x in of_keys_KGD]


def _mask(num_q: int, num_k: int, p: Varlen, like: Tensor) -> Tensor:
    """(num_q, num_k), -inf where a query of a causal problem does not see a key, else 0."""
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
    found = run(*heads_first, lse[None].contiguous(), **_cpu_options(q, k, p))
    return tuple(x[0].transpose(0, 1) for x in found)


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _scores(q: Tensor, k: Tensor, p: Varlen) -> tuple[Tensor, Tensor | float]:
    """(H, Q, K), -inf where hidden, and what capping did to their slope."""
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
    """What a kernel does to capped scores or their gradients that it should not; empty if nothing.

    A build of flash-attn 2 without them leaves the ``tanh`` out and multiplies scores by the cap, in stock verl too.
    flash-attn 3 raises then; betas of flash-attn 4 had wrong gradients of queries, and later ones raise for some heads
    and GPUs (https://github.com/Dao-AILab/flash-attention/pull/2544).
    """
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    lengths = (3, 200)  # one of them longer than a kernel's block
    drawn = torch.randn(6, sum(lengths), head_dim, generator=torch.Generator().manual_seed(0), device="cpu")
    tensors = [x.transpose(0, 1).contiguous() for x in drawn.to(device_type, dtype).split([2, 1, 1, 2])]
    cu_seqlens = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device_type)
    # Scores have a standard deviation of 3, so that the cap moves most of them.
    longest = max(lengths)
    problem = Varlen(cu_seqlens, cu_seqlens, longest, longest, softmax_scale=3 / head_dim**0.5, softcap=2.0)

    def outcome(pair: Passes, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Gradients:
        out, lse = pair[0](q, k, v, problem)
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        pair[1](dout, q, k, v, out, lse, *gradients, problem)
        return out, *gradients

    try:
        found = outcome(pair, *tensors)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # no fault of the kernel
        raise
    except Exception as error:  # builds refuse with whatever comes to hand: RuntimeError, AssertionError
        return f"does not take capped scores (softcap): {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    wanted = outcome(sdpa(), *(x.float() for x in tensors))
    errors = [((got.float() - want).norm() / want.norm()).item() for got, want in zip(found, wanted, strict=True)]
    # bf16 is off by about 0.01, a kernel without caps by 1.8 and more. Not "any greater": an error may be nan.
    if all(error < 0.1 for error in errors):
        return ""
    off = ", ".join(f"{error:.0%}" for error in errors)
    return f"does not cap scores (softcap) as it is built: out, dq, dk and dv are off by {off}"
