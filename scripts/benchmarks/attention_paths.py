"""The ways of computing an attention problem that ``bench_attention.py`` compares."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.attention_cases import Outcome, Problem
from verl_pg_plugin.attention.kernels import Kernel, kernel_obstacle, select_kernel
from verl_pg_plugin.attention.kernels import KERNELS
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.op import AttentionOptions
from verl_pg_plugin.cost.pairs import num_pairs

PATHS = tuple(f"{route}:{name}" for route in ("replicated", "packed") for name in KERNELS)
BASELINE = "replicated:flash_attn_2"


@dataclass(frozen=True)
class Run:
    """A path ready to run on its own copies of the inputs.

    Attributes:
        attend: output from q, k and v.
        q, k, v: leaves that require a gradient.
        grad_out: gradient by the output; that of a shared row stands in each of its copies.
        outcome: exact results for the packed rows, shared rows counted once.
        pairs: (query, key) pairs it computes.
    """

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    outcome: Callable[[], Outcome]
    pairs: int

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.attend(self.q, self.k, self.v)

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        out = self.attend(self.q, self.k, self.v)
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.grad_out)


def path_obstacle(path: str, problem: Problem) -> str:
    """Why a path cannot run; empty if it can."""
    name = path.split(":")[1]
    obstacle = kernel_obstacle(name, problem.device.type)
    return f"{name} {obstacle}" if obstacle else ""


def build_path(path: str, problem: Problem) -> Run:
    route, name = path.split(":")
    kernel = select_kernel(name, problem.device.type)
    if route == "replicated":
        return _replicated(problem, kernel)
    packed = PackedAttention(problem.layout, kernel, problem.device)
    return _over_packed_rows(
        problem, lambda q, k, v: packed.attend_packed(q, k, v, AttentionOptions(problem.softmax_scale))
    )


def _over_packed_rows(problem: Problem, attend: Callable[..., torch.Tensor]) -> Run:
    q, k, v = _leaves(problem.q, problem.k, problem.v)

    def outcome() -> Outcome:
        out = attend(q, k, v)
        return Outcome(out.detach(), *torch.autograd.grad(out, (q, k, v), problem.grad_out))

    return Run(attend, q, k, v, problem.grad_out, outcome, num_pairs(problem.layout))


def _replicated(problem: Problem, kernel: Kernel) -> Run:
    sequences = problem.case.sequence_rows()
    device = problem.device
    rows = torch.from_numpy(np.concatenate([np.arange(*part) for ranges in sequences for part in ranges])).to(device)
    lengths = np.asarray([sum(stop - start for start, stop in ranges) for ranges in sequences])
    cu_seqlens = torch.tensor([0, *lengths.tolist()], device=device).cumsum(0).to(torch.int32)
    longest = int(lengths.max())
    q, k, v = _leaves(problem.q[rows], problem.k[rows], problem.v[rows])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scale = problem.softmax_scale
        return kernel.attend(q, k, v, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=scale)

    def outcome() -> Outcome:
        first = _first_places(rows, problem.layout.num_rows)
        counted = torch.zeros(len(rows), dtype=torch.bool, device=device)
        counted[first] = True
        out = attend(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), problem.grad_out[rows] * counted[:, None, None])
        totals = []
        for grad in grads:
            total = torch.zeros(problem.layout.num_rows, *grad.shape[1:], device=device)
            totals.append(total.index_add_(0, rows, grad.float()).to(grad.dtype))
        return Outcome(out.detach()[first], *totals)

    pairs = int((lengths * (lengths + 1) // 2).sum())
    return Run(attend, q, k, v, problem.grad_out[rows], outcome, pairs)


def _first_places(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(num_rows,) index of the first copy of each packed row."""
    places = torch.arange(len(rows), device=rows.device)
    first = torch.full((num_rows,), len(rows), device=rows.device)
    return first.scatter_reduce(0, rows, places, "amin")


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]
