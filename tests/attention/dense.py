"""Reference for the packed op: attention of every sequence alone, with explicit scores."""

from typing import NamedTuple

import pytest
import torch

from tests.layout.tries import Batch, sequence_rows
from verl_pg_plugin.attention import plan
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.kernels import Kernel, select_kernel
from verl_pg_plugin.attention.op import AttentionOptions
from verl_pg_plugin.layout import PackedLayout


class Tensors(NamedTuple):
    """Queries (T, H, D), keys and values (T, G, D) of packed tokens, the gradient by the output, and sinks (H,)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    sinks: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Tensors":
        return Tensors(*(None if tensor is None else tensor.to(dtype) for tensor in self))

    def leaves(self) -> list[torch.Tensor]:
        tensors = (self.q, self.k, self.v, self.sinks)
        return [tensor.detach().clone().requires_grad_() for tensor in tensors if tensor is not None]


def random_tensors(
    num_tokens, heads, kv_heads, head_dim, seed, dtype, device="cpu", value_dim=None, sinks=False
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    values = head_dim if value_dim is None else value_dim
    sizes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, values), (heads, values))
    drawn = [torch.randn(num_tokens, *size, generator=generator, dtype=torch.float64) for size in sizes]
    if sinks:
        drawn.append(torch.randn(heads, generator=generator, dtype=torch.float64))
    return Tensors(*(tensor.to(dtype).to(device) for tensor in drawn))


def cut(monkeypatch: pytest.MonkeyPatch, cuts: tuple[float, float], shortest: int = 1) -> None:
    """Set the limit of gathered keys per token, and the saving that a separate problem requires."""
    gathered, saved = cuts
    limits = {"GATHERED_PER_TOKEN": gathered, "GATHERED_IN_BACKWARD": gathered / 2, "ALWAYS_GATHERED": 0}
    saving = {"SAVED_PER_TOKEN": saved, "SAVED_OVER_LIMIT": saved, "SHORTEST_IN_PLACE": shortest}
    for name, number in (limits | saving).items():
        monkeypatch.setattr(plan, name, number)


class Outcome(NamedTuple):
    """Output (T, H, D) of attention and the gradients of q, k, v and the sinks."""

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None = None


def assert_equal(actual: Outcome, expected: Outcome, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def attend_sequence(q_LHD, k_LGD, v_LGD, softmax_scale, window_size=-1, softcap=0.0, sinks_H=None) -> torch.Tensor:
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
    if sinks_H is not None:
        scores_HLL = torch.cat([scores_HLL, sinks_H[:, None, None].expand(-1, len(q_LHD), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores_HLL.softmax(dim=-1)[..., : len(q_LHD)], v_LHD)


def dense_outcome(tensors: Tensors, batch: Batch, window_size: int = -1, softcap: float = 0.0) -> Outcome:
    """Attend each sequence, gathered by its tokens without the layout's index maps; shared tokens count once."""
    layout = batch.layout()
    q, k, v, *sinks = leaves = tensors.leaves()
    out, seen = torch.zeros_like(tensors.grad_out), torch.zeros(len(q), dtype=torch.bool)
    for tokens in batch.sequences:
        rows = torch.tensor(sequence_rows(layout, tokens), dtype=torch.int64)
        attended = attend_sequence(q[rows], k[rows], v[rows], q.shape[-1] ** -0.5, window_size, softcap, *sinks)
        fresh = ~seen[rows]
        out = out.index_copy(0, rows[fresh].to(q.device), attended[fresh.to(q.device)])
        seen[rows] = True
    return Outcome(out.detach(), *torch.autograd.grad(out, leaves, tensors.grad_out))


def packed_outcome(
    tensors: Tensors, layout: PackedLayout, window_size: int = -1, kernel: Kernel | None = None, softcap: float = 0.0
) -> Outcome:
    packed = PackedAttention(layout, kernel or select_kernel("sdpa", tensors.q.device.type))
    q, k, v, *sinks = leaves = tensors.leaves()
    out = packed.attend_packed(q, k, v, AttentionOptions(q.shape[-1] ** -0.5, window_size, softcap, 0, *sinks))
    return Outcome(out.detach(), *torch.autograd.grad(out, leaves, tensors.grad_out))
