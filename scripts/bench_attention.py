"""Time the attention op alone, forward and backward: unshared sequences against shared prefixes.

    python scripts/bench_attention.py --csv outputs/bench_attention.csv
    python scripts/bench_attention.py --cases 8192,1024,8 8192,64,256 --paths alone:flash_attn_2 packed:flash_attn_4

A case is P,R,n[,groups]: prompt and response tokens, responses per prompt, prompts; or tree:P,STEP,BRANCHES,DEPTH: a
search tree below a prompt, STEP tokens a node, each leaf a sequence. Paths are ``alone:KERNEL`` (unshared, as with
remove-padding) and ``packed:KERNEL`` (shared prefixes once), by default of all kernels that can run here. Speed-up and
error are against the first path of ``alone``, flash-attn 2 if present. The bound is the ratio of (query, key) pairs.
The error is the worst of out, dq, dk and dv: its norm against float32, divided by the baseline's.

Shapes: T packed tokens, H query heads, G key/value heads, D head size, L tokens of one sequence, C queries of a chunk.
"""

import argparse
import statistics
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import environment, free_memory, print_table, write_csv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.kernels import KERNELS, kernel_obstacle, select_kernel
from verl_pg_plugin.attention.op import AttentionOptions
from verl_pg_plugin.layout import build_packed_layout
from verl_pg_plugin.planning.cost import visible_pairs

QUERY_CHUNK = 256
"""Queries for each block of float32 scores: 256 x 32 heads x 33k keys take 1 GiB."""
Tensors = tuple[torch.Tensor, ...]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
COLUMNS = """
case path shape dtype forward_ms both_ms both_min_ms both_max_ms speedup bound tflops_per_s peak_gib error error_ratio
repeats device driver versions commit
"""
SHOWN = "case path forward_ms both_ms speedup bound tflops_per_s peak_gib error_ratio"


class Row(namedtuple("Row", COLUMNS)):
    """One path in one case; times in milliseconds, both = forward + backward."""


def _groups(prompt: int, response: int, n: int, groups: int = 1) -> list[np.ndarray]:
    sequences = []
    for first in range(1, 1 + groups * (n + 1), n + 1):
        sequences += [np.repeat([first, first + 1 + sample], [prompt, response]) for sample in range(n)]
    return sequences


def _tree(prompt: int, step: int, branches: int, depth: int) -> list[np.ndarray]:
    sequences = [np.full(prompt, 1)]
    for _ in range(depth):
        sequences = [np.append(path, np.full(step, 2 + child)) for path in sequences for child in range(branches)]
    return sequences


class Problem:
    """Random q and grad_out (T, H, D), k and v (T, G, D) of a case's packed tokens, and its sequences."""

    def __init__(self, case: str, args: argparse.Namespace) -> None:
        kind, _, numbers = case.rpartition(":")
        shape = tuple(map(int, numbers.split(",")))
        sequences = (_tree if kind == "tree" else _groups)(*shape)
        offsets = np.cumsum([0, *map(len, sequences)])
        self.layout = build_packed_layout(np.concatenate(sequences), offsets, np.full(len(sequences), shape[0]))
        # A sequence's packed tokens are the keys of its last segment, from which no other continues.
        segments, bounds = np.arange(len(self.layout.segment_parent)), self.layout.cu_seqlens_k
        last = np.setdiff1d(segments, self.layout.segment_parent)
        keys = [self.layout.kv_index[bounds[segment] : bounds[segment + 1]] for segment in last]
        self.places = [torch.from_numpy(own).to(args.device, torch.int64) for own in keys]
        self.scale = args.head_dim**-0.5
        generator = torch.Generator(args.device).manual_seed(0)
        self.q, self.k, self.v, self.grad_out = (
            torch.randn(self.layout.num_tokens, heads, args.head_dim, generator=generator, device=args.device).to(
                getattr(torch, args.dtype)
            )
            for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
        )

    def exact(self) -> Tensors:
        """Return out, dq, dk and dv by torch's plain float32 softmax; a shared token counts once."""
        q, k, v = self.q.float(), self.k.float(), self.v.float()
        out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
        seen = 0
        for places in self.places:
            k_LGD, v_LGD = k[places].requires_grad_(), v[places].requires_grad_()
            for start in range(int((places < seen).sum()), len(places), QUERY_CHUNK):
                stop = min(start + QUERY_CHUNK, len(places))
                chunk = places[start:stop]
                q_CHD = q[chunk].requires_grad_()
                by_head = (x.transpose(0, 1)[None] for x in (q_CHD, k_LGD[:stop], v_LGD[:stop]))
                visible_CL = torch.ones(len(chunk), stop, dtype=torch.bool, device=q.device).tril(start)
                with sdpa_kernel(SDPBackend.MATH):
                    attended = scaled_dot_product_attention(*by_head, attn_mask=visible_CL, enable_gqa=True)
                attended_CHD = attended[0].transpose(0, 1)
                attended_CHD.backward(self.grad_out[chunk].float())
                out[chunk], dq[chunk] = attended_CHD.detach(), q_CHD.grad
            dk.index_add_(0, places, k_LGD.grad)
            dv.index_add_(0, places, v_LGD.grad)
            seen = int(places[-1]) + 1
        return out, dq, dk, dv


class AttentionPath:
    """A way to compute a problem, with its own copies of the inputs."""

    def __init__(self, name: str, problem: Problem) -> None:
        route, kernel_name = name.split(":")
        device = problem.q.device
        kernel, options = select_kernel(kernel_name, device.type), AttentionOptions(problem.scale)
        self.problem = problem
        if route == "alone":
            self.places = torch.cat(problem.places)
            lengths = [len(places) for places in problem.places]
            offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
            packed = PackedAttention.unshared(kernel, offsets, max(lengths), sum(lengths))
            self.pairs = sum(length * (length + 1) // 2 for length in lengths)
        else:
            self.places = torch.arange(len(problem.q), device=device)
            packed = PackedAttention(problem.layout, kernel)
            keys, queries = (np.diff(x) for x in (problem.layout.cu_seqlens_k, problem.layout.cu_seqlens_q))
            self.pairs = int(visible_pairs(keys - queries, queries).sum())
        self.attend: Attend = lambda q, k, v: packed.attend_packed(q, k, v, options)
        self.inputs = [x[self.places].requires_grad_() for x in (problem.q, problem.k, problem.v)]
        self.grad_out = problem.grad_out[self.places]

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.attend(*self.inputs)

    def forward_backward(self) -> Tensors:
        return torch.autograd.grad(self.attend(*self.inputs), self.inputs, self.grad_out)

    def outcome(self) -> Tensors:
        """Return output and gradients of the packed tokens; only a shared token's first copy has an output gradient."""
        first = torch.from_numpy(np.unique(self.places.cpu(), return_index=True)[1]).to(self.places.device)
        counted = torch.zeros_like(self.places, dtype=torch.bool).index_fill(0, first, True)
        out = self.attend(*self.inputs)
        grads = torch.autograd.grad(out, self.inputs, self.grad_out * counted[:, None, None])
        sums = (
            torch.zeros_like(grad[first], dtype=torch.float32).index_add_(0, self.places, grad.float())
            for grad in grads
        )
        return out.detach()[first], *(total.to(out.dtype) for total in sums)


def relative_error(outcome: Tensors, exact: Tensors) -> list[float]:
    """Return the relative error norms of out, dq, dk and dv."""
    return [float((own.float() - want).norm() / want.norm()) for own, want in zip(outcome, exact, strict=True)]


def time_ms(function: Callable[[], object], repeats: int, device: str) -> list[float]:
    """Return the milliseconds of each call; on a GPU from events, so that the host can run ahead."""
    if device == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for start_event, end_event in events:
        start_event.record()
        function()
        end_event.record()
    torch.cuda.synchronize()
    return [start_event.elapsed_time(end_event) for start_event, end_event in events]


def run_case(case: str, args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    base: dict[str, Any] = {}
    on_gpu = args.device != "cpu"
    for name in sorted(args.paths, key=lambda name: (not name.startswith("alone"), name != "alone:flash_attn_2")):
        free_memory()
        problem = Problem(case, args)
        path = AttentionPath(name, problem)
        errors = [] if args.no_check else relative_error(path.outcome(), problem.exact())
        time_ms(path.forward, 2, args.device)  # compiles kernels
        time_ms(path.forward_backward, 2, args.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        both = time_ms(path.forward_backward, args.repeats, args.device)
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        forward = time_ms(path.forward, args.repeats, args.device)
        middle = statistics.median(both)
        base = base or {"pairs": path.pairs, "both": middle, "errors": errors}
        rows.append(
            Row(
                case=case,
                path=name,
                shape=f"{args.heads}/{args.kv_heads} heads of {args.head_dim}",
                dtype=args.dtype,
                forward_ms=statistics.median(forward),
                both_ms=middle,
                both_min_ms=min(both),
                both_max_ms=max(both),
                speedup=base["both"] / middle,
                bound=base["pairs"] / path.pairs,
                # 4 operations per pair, head and dim forward, 10 backward.
                tflops_per_s=14 * path.pairs * args.heads * args.head_dim / middle / 1e9,
                peak_gib=peak,
                error=max(errors, default=float("nan")),
                error_ratio=max((a / b for a, b in zip(errors, base["errors"], strict=True)), default=float("nan")),
                repeats=len(both),
                **environment(),
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_cases = ["4096,1024,8", "8192,1024,8", "8192,2048,16", "8192,1024,1"]
    parser.add_argument("--cases", nargs="+", default=default_cases)
    parser.add_argument("--paths", nargs="+")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    usable = [name for name in KERNELS if not kernel_obstacle(name, args.device)]
    args.paths = args.paths or [f"{route}:{name}" for route in ("alone", "packed") for name in usable]
    rows: list[Row] = []
    for case in args.cases:
        rows += run_case(case, args)
        print_table(rows[-len(args.paths) :], SHOWN)
        if args.csv:
            write_csv(rows, args.csv)  # after every case, for interrupted runs
    return 0


if __name__ == "__main__":
    sys.exit(main())
