"""Random attention problems of groups and of turns, and their answer in float32, for ``bench_attention.py``.

Shape legend: T packed rows, H query heads, G key/value heads, D head dim, L rows of one sequence.
"""

from dataclasses import dataclass

import numpy as np
import torch

from verl_pg_plugin.layout import PackedLayout, build_packed_layout

QUERY_CHUNK = 256
"""Queries whose float32 scores are held at once: 256 x 32 heads x 33k keys is 1 GiB, a few of those live."""


@dataclass(frozen=True)
class Case:
    """Prompt tokens, response tokens, responses per prompt, prompts."""

    prompt: int
    response: int
    n: int
    groups: int = 1

    @classmethod
    def parse(cls, text: str) -> "Case":
        return cls(*(int(number) for number in text.split(",")))

    def __str__(self) -> str:
        return f"{self.prompt},{self.response},{self.n},{self.groups}"

    def layout(self) -> PackedLayout:
        """Of tokens that differ wherever they may: groups fork at once, responses at their first token."""
        sequences, prompts = [], []
        for group in range(self.groups):
            for sample in range(self.n):
                first = 1 + group * (self.n + 1)
                prompt = np.full(self.prompt, first)
                sequences.append(np.concatenate([prompt, np.full(self.response, first + 1 + sample)]))
                prompts.append(self.prompt)
        offsets = np.cumsum([0, *map(len, sequences)])
        return build_packed_layout(np.concatenate(sequences), offsets, np.asarray(prompts))

    def sequence_rows(self) -> list[list[tuple[int, int]]]:
        """For each sequence its (start, stop) ranges of packed rows, from the numbers alone and not from the layout."""
        sequences, row = [], 0
        shared = self.prompt - 1 if self.n > 1 else 0
        own = self.prompt + self.response - 1 - shared
        for _ in range(self.groups):
            prefix = (row, row + shared)
            row += shared
            for _ in range(self.n):
                sequences.append([prefix, (row, row + own)])
                row += own
        return sequences


@dataclass(frozen=True)
class Turns:
    """One session whose turns are sequences, each continuing the one before it; tokens read and written in a turn."""

    turns: int
    read: int
    written: int

    @classmethod
    def parse(cls, text: str) -> "Turns":
        return cls(*(int(number) for number in text.split(",")))

    def __str__(self) -> str:
        return f"turns:{self.turns},{self.read},{self.written}"

    def _lengths(self) -> np.ndarray:
        return (self.read + self.written) * np.arange(1, self.turns + 1)

    def layout(self) -> PackedLayout:
        lengths = self._lengths()
        tokens = np.concatenate([np.arange(length) for length in lengths])
        return build_packed_layout(tokens, np.append(0, np.cumsum(lengths)), lengths - self.written)

    def sequence_rows(self) -> list[list[tuple[int, int]]]:
        """As ``Case.sequence_rows``: every sequence begins with the first row."""
        return [[(0, length - 1)] for length in self._lengths().tolist()]


def parse_case(text: str) -> Case | Turns:
    return Turns.parse(text.removeprefix("turns:")) if text.startswith("turns:") else Case.parse(text)


@dataclass(frozen=True)
class Outcome:
    """Output (T, H, D) of attention and the gradients of q, k and v."""

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@dataclass(frozen=True)
class Problem:
    """q and grad_out (T, H, D), k and v (T, G, D) of the packed rows of a case."""

    case: Case | Turns
    layout: PackedLayout
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def softmax_scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @classmethod
    def random(
        cls, case: Case | Turns, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> "Problem":
        layout = case.layout()
        generator = torch.Generator(device).manual_seed(0)
        drawn = [
            torch.randn(layout.num_tokens, n, head_dim, generator=generator, dtype=dtype, device=device)
            for n in (heads, kv_heads, kv_heads, heads)
        ]
        return cls(case, layout, *drawn)


def float32_outcome(problem: Problem) -> Outcome:
    """Softmax written out in float32 (no TF32), a chunk of queries at a time; a shared row counts once."""
    q, k, v = (x.float() for x in (problem.q, problem.k, problem.v))
    dq, dk, dv, out = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(q)
    seen = 0
    for ranges in problem.case.sequence_rows():
        rows = torch.cat([torch.arange(*part, device=q.device) for part in ranges])
        k_LGD, v_LGD = k[rows].requires_grad_(), v[rows].requires_grad_()
        fresh = int((rows < seen).sum())
        for start in range(fresh, len(rows), QUERY_CHUNK):
            stop = min(start + QUERY_CHUNK, len(rows))
            chunk = rows[start:stop]
            q_LHD = q[chunk].requires_grad_()
            attended = _attend_chunk(q_LHD, k_LGD[:stop], v_LGD[:stop], problem.softmax_scale)
            attended.backward(problem.grad_out[chunk].float())
            out[chunk], dq[chunk] = attended.detach(), q_LHD.grad
        dk.index_add_(0, rows, k_LGD.grad)
        dv.index_add_(0, rows, v_LGD.grad)
        seen = int(rows[-1]) + 1
    return Outcome(out, dq, dk, dv)


def _attend_chunk(q_CHD: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor, scale: float) -> torch.Tensor:
    """C queries, the last ones of L rows."""
    num_q, heads, head_dim = q_CHD.shape
    num_k, groups = k_LGD.shape[:2]
    q_GMD = q_CHD.view(num_q, groups, -1, head_dim).permute(1, 2, 0, 3).reshape(groups, -1, head_dim)
    scores_GMCL = (q_GMD @ k_LGD.permute(1, 2, 0) * scale).view(groups, -1, num_q, num_k)
    position = torch.arange(num_k - num_q, num_k, device=q_CHD.device)
    hidden_CL = torch.arange(num_k, device=q_CHD.device) > position[:, None]
    weights_GML = scores_GMCL.masked_fill(hidden_CL, float("-inf")).softmax(dim=-1).reshape(groups, -1, num_k)
    out_GMCD = (weights_GML @ v_LGD.transpose(0, 1)).view(groups, -1, num_q, head_dim)
    return out_GMCD.permute(2, 0, 1, 3).reshape(num_q, heads, head_dim)


def relative_errors(outcome: Outcome, exact: Outcome) -> dict[str, float]:
    """Norm of the error divided by the norm of the exact tensor."""
    errors = {}
    for name in ("out", "dq", "dk", "dv"):
        want = getattr(exact, name)
        errors[name] = float((getattr(outcome, name).float() - want).norm() / want.norm())
    return errors
