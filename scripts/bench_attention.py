"""Time the attention op alone, forward and backward: every sequence by itself against shared prefixes.

    python scripts/bench_attention.py --csv outputs/bench_attention.csv
    python scripts/bench_attention.py --cases 8192,1024,8 --paths replicated:flash_attn_2 packed:flash_attn_4
    python scripts/bench_attention.py --cases 8192,64,256 30000,32,64 turns:200,100,64 --paths packed:flash_attn_2

A case is P,R,n[,groups]: prompt and response tokens, responses per prompt, prompts; or turns:N,READ,WRITTEN: a session
of N turns, each a sequence that continues the one before it. The third line has those where most keys are copied per
row; every sequence by itself would need more memory than a GPU has. Paths are ``replicated:KERNEL``
(each sequence with its own copy of the prompt, as remove-padding runs it) and ``packed:KERNEL`` (rows of shared
prefixes gathered). Speed-up is against replicated:flash_attn_2 in the same run, or the first replicated path; the bound
is the ratio of (query, key) pairs. Errors are norms against float32, divided by that baseline's own; the worst of out,
dq, dk and dv is shown. Forward alone runs without autograd.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.attention_cases import Case, Problem, Turns, float32_outcome, parse_case, relative_errors
from benchmarks.attention_paths import BASELINE, PATHS, build_path, path_obstacle
from benchmarks.common import environment, write_csv
from rich.console import Console
from rich.table import Table

DEFAULT_CASES = ("4096,1024,8", "8192,1024,8", "8192,2048,16", "32768,512,32", "8192,1024,1")


@dataclass(frozen=True)
class Row:
    """One path in one case; times in milliseconds, both = forward + backward."""

    case: str
    path: str
    skipped: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    forward_ms: float
    both_ms: float
    both_min_ms: float
    both_max_ms: float
    speedup: float
    bound: float
    tflops_per_s: float
    copied_keys_per_row: float
    peak_gib: float
    error_ratio: float
    error_out: float
    error_dq: float
    error_dk: float
    error_dv: float
    repeats: int
    device: str
    driver: str
    versions: str
    commit: str


@dataclass(frozen=True)
class Measurement:
    """Milliseconds, GiB and relative errors of out, dq, dk, dv of one path."""

    forward: float
    both: list[float]
    peak_gib: float
    pairs: int
    errors: dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=parse_case, default=list(map(parse_case, DEFAULT_CASES)))
    parser.add_argument("--paths", nargs="+", choices=PATHS, help="default: all, on a GPU without sdpa")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20, help="calls timed, at most")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="time fewer than that (at least 3) if they last longer"
    )
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with float32")
    parser.add_argument("--profile", action="store_true", help="also list the GPU kernels of each path by time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if args.paths is None:
        args.paths = [path for path in PATHS if args.device == "cpu" or not path.endswith(":sdpa")]
    console, about, rows = Console(width=150), environment(), []
    for case in args.cases:
        rows += run_case(case, args, about, console)
        if args.csv:
            write_csv(rows, args.csv)  # after every case, so that a run cut short keeps what it measured
    console.print(f"{about['device']}, driver {about['driver']}, {about['versions']}, commit {about['commit']}")
    return 0


def run_case(case: Case | Turns, args: argparse.Namespace, about: dict[str, Any], console: Console) -> list[Row]:
    problem = Problem.random(case, args.heads, args.kv_heads, args.head_dim, getattr(torch, args.dtype), args.device)
    exact = None if args.no_check else float32_outcome(problem)
    measured: dict[str, Measurement] = {}
    skipped: dict[str, str] = {}
    for path in args.paths:
        obstacle = path_obstacle(path, problem)
        if obstacle:
            skipped[path] = obstacle
            continue
        run = build_path(path, problem)
        errors = {} if exact is None else relative_errors(run.outcome(), exact)
        measured[path] = measure(run.forward, run.forward_backward, run.pairs, errors, args)
        if args.profile and problem.device.type == "cuda":
            profile(path, run.forward_backward, console)
        del run
        release()

    base_name = BASELINE if BASELINE in measured else next((p for p in measured if p.startswith("replicated")), None)
    base = measured.get(base_name) if base_name else None
    nan = float("nan")
    shape: dict[str, Any] = {
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "dtype": args.dtype,
    }
    rows = []
    for path in args.paths:
        found = measured.get(path)
        both = statistics.median(found.both) if found else nan
        errors = found.errors if found else {}
        named_errors: dict[str, Any] = {f"error_{name}": errors.get(name, nan) for name in ("out", "dq", "dk", "dv")}
        rows.append(
            Row(
                case=str(case),
                path=path,
                skipped=skipped.get(path, ""),
                forward_ms=found.forward if found else nan,
                both_ms=both,
                both_min_ms=min(found.both) if found else nan,
                both_max_ms=max(found.both) if found else nan,
                speedup=statistics.median(base.both) / both if found and base else nan,
                bound=base.pairs / found.pairs if found and base else nan,
                # 4 operations per pair, head and dim forward, 10 backward.
                tflops_per_s=14 * found.pairs * args.heads * args.head_dim / both / 1e9 if found else nan,
                copied_keys_per_row=problem.layout.num_gathered_kv / problem.layout.num_tokens,
                peak_gib=found.peak_gib if found else nan,
                error_ratio=max((errors[k] / base.errors[k] for k in errors), default=nan) if base else nan,
                **named_errors,
                repeats=len(found.both) if found else 0,
                **shape,
                **about,
            )
        )
    show(rows, base_name, console)
    del problem, exact
    release()
    return rows


def measure(
    forward: Callable[[], object],
    forward_backward: Callable[[], object],
    pairs: int,
    errors: dict[str, float],
    args: argparse.Namespace,
) -> Measurement:
    cuda = torch.device(args.device).type == "cuda"
    time_ms(forward, 1, cuda)  # compiles what is compiled on first use
    estimate = time_ms(forward_backward, 2, cuda)[-1]
    repeats = max(3, min(args.repeats, int(1e3 * args.seconds / estimate)))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    both = time_ms(forward_backward, repeats, cuda)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return Measurement(statistics.median(time_ms(forward, repeats, cuda)), both, peak, pairs, errors)


def time_ms(function: Callable[[], object], repeats: int, cuda: bool) -> list[float]:
    """Milliseconds of each call; on a GPU between events on the stream, so that the host may run ahead."""
    if not cuda:
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


def profile(path: str, function: Callable[[], object], console: Console) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            function()
        torch.cuda.synchronize()
    averages = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)[:8]
    table = Table(f"{path}: GPU kernel", "ms / step", "calls")
    for event in averages:
        table.add_row(event.key[:100], f"{event.device_time_total / 5e3:.3f}", f"{event.count / 5:g}")
    console.print(table)


def show(rows: list[Row], base_name: str | None, console: Console) -> None:
    table = Table(
        "path", "fwd ms", "fwd+bwd ms", "min..max", "speed-up", "bound", "TFLOP/s", "GiB", "error x", title=rows[0].case
    )
    for row in rows:
        if row.skipped:
            table.add_row(row.path, "skipped", *[""] * 7)
            continue
        table.add_row(
            row.path,
            f"{row.forward_ms:.3f}",
            f"{row.both_ms:.3f}",
            f"{row.both_min_ms:.3f}..{row.both_max_ms:.3f}",
            f"{row.speedup:.2f}",
            f"{row.bound:.2f}",
            f"{row.tflops_per_s:.0f}",
            f"{row.peak_gib:.2f}",
            f"{row.error_ratio:.3f}",
        )
    console.print(table)
    for row in rows:
        if row.skipped:
            console.print(f"skipped {row.path}: {row.skipped}", markup=False)
    console.print(f"speed-up and error against {base_name}")


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
