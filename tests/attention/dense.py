"""Attention written out: every sequence alone, every score explicit. What the packed op is held against."""

from dataclasses import dataclass

import torch

from tests.layout.tries import sequence_rows
from verl_pg_plugin.attention.kernels import Kernel, select_kernel
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.op import AttentionOptions
from verl_pg_plugin.layout import PackedLayout


@dataclass(frozen=True)
class Tensors:
    """Queries (T, H, D), keys and values (T, G, D) of packed rows and the gradient of the loss by the output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor

    def to(self, dtype: torch.dtype) -> "Tensors":
        return Tensors(*(tensor.to(dtype) for tensor in (self.q, self.k, self.v, self.grad_out)))


def random_tensors(
    num_rows: int, heads: int, kv_heads: int, head_dim: int, seed: int, dtype: torch.dtype, device: str = "cpu"
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, kv_heads, kv_heads, heads)
    drawn = [torch.randn(num_rows, n, head_dim, generator=generator, dtype=torch.float64) for n in sizes]
    return Tensors(*(tensor.to(dtype).to(device) for tensor in drawn))


@dataclass(frozen=True)
class Outcome:
    """Output (T, H, D) of attention and the gradients of q, k and v."""

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def attend_sequence(
    q_LHD: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    softmax_scale: float,
    window_size: int = -1,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal softmax attention of one sequence; ``window_size`` keys to the left of a query, -1 for all."""
    repeats = q_LHD.shape[1] // k_LGD.shape[1]
    k_LHD, v_LHD = k_LGD.repeat_interleave(repeats, dim=1), v_LGD.repeat_interleave(repeats, dim=1)
    scores_HLL = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * softmax_scale
    if softcap:
        scores_HLL = softcap * torch.tanh(scores_HLL / softcap)
    distance = torch.arange(len(q_LHD))[:, None] - torch.arange(len(q_LHD))
    hidden = distance < 0
    if window_size >= 0:
        hidden |= distance > window_size
    scores_HLL = scores_HLL.masked_fill(hidden.to(scores_HLL.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores_HLL.softmax(dim=-1), v_LHD)


def dense_outcome(
    tensors: Tensors,
    layout: PackedLayout,
    sequences: tuple[tuple[int, ...], ...],
    window_size: int = -1,
    softcap: float = 0.0,
) -> Outcome:
    """Each sequence gathered by its tokens, not by the layout's own index maps; a shared row counts once."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (tensors.q, tensors.k, tensors.v))
    out, seen = torch.zeros_like(tensors.q), torch.zeros(len(q), dtype=torch.bool)
    for tokens in sequences:
        rows = torch.tensor(sequence_rows(layout, tokens))
        attended = attend_sequence(q[rows], k[rows], v[rows], q.shape[-1] ** -0.5, window_size, softcap)
        fresh = ~seen[rows]
        out = out.index_copy(0, rows[fresh].to(q.device), attended[fresh.to(q.device)])
        seen[rows] = True
    out.backward(tensors.grad_out)
    return Outcome(out.detach(), q.grad, k.grad, v.grad)


def packed_outcome(
    tensors: Tensors,
    layout: PackedLayout,
    window_size: int = -1,
    kernel: Kernel | None = None,
    softcap: float = 0.0,
) -> Outcome:
    """``PackedAttention`` of the same tensors."""
    device = tensors.q.device
    packed = PackedAttention(layout, kernel or select_kernel("sdpa", device.type), device)
    q, k, v = (t.detach().clone().requires_grad_() for t in (tensors.q, tensors.k, tensors.v))
    out = packed.attend_packed(q, k, v, AttentionOptions(q.shape[-1] ** -0.5, window_size, softcap))
    out.backward(tensors.grad_out)
    return Outcome(out.detach(), q.grad, k.grad, v.grad)
