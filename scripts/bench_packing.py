"""Packing against the plain loops it replaces, at the sizes of a training batch and at tiny ones.

    python scripts/bench_packing.py                  # CPU
    python scripts/bench_packing.py --device cuda    # the segment sum on the GPU, and its kernel against the limits

Every repetition times the loop and then the vectorised version, so a ratio and its spread come from one run. The CSV
holds one line a case, with the device, the versions and the git commit.
"""

import argparse
import csv
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import packing_reference
from rich.console import Console
from rich.table import Table

from verl_pg_plugin.packing import (
    batch_unsorted_segment_sum,
    create_pack_group,
    pack_grouped_data,
    pack_grpo_data,
)
from verl_pg_plugin.packing.segment_sum_scatter import scatter_sum

PAD_TOKEN_ID = 0


@dataclass(frozen=True)
class Case:
    """Two callables with one result; `inner` calls make one timing, so that tiny cases can be timed at all."""

    operation: str
    setting: str
    device: str
    baseline_name: str
    baseline: Callable[[], Any]
    ours: Callable[[], Any]
    inner: int = 1


@dataclass(frozen=True)
class Quartiles:
    """Median and middle half of the repetitions."""

    median: float
    q25: float
    q75: float

    @classmethod
    def of(cls, sample: np.ndarray) -> "Quartiles":
        return cls(*(float(f"{value:.4g}") for value in np.percentile(sample, [50, 25, 75])))


@dataclass(frozen=True)
class Result:
    """Times in milliseconds a call; `ratio` is baseline / ours, taken within a repetition."""

    operation: str
    setting: str
    device: str
    baseline: str
    baseline_ms: Quartiles
    ours_ms: Quartiles
    ratio: Quartiles
    repeats: int

    def row(self) -> dict[str, Any]:
        """The CSV line: a column for each quartile, and what the figures depend on."""
        line: dict[str, Any] = {}
        for name, value in asdict(self).items():
            nested = value if isinstance(value, dict) else {"": value}
            line |= {f"{name}_{key}".rstrip("_"): entry for key, entry in nested.items()}
        versions = {"threads": torch.get_num_threads(), "torch": torch.__version__, "numpy": np.__version__}
        return line | versions | {"commit": git_commit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_packing.csv"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA GPU; none is visible")

    results = [measure(case, arguments.repeats) for case in cases(torch.device(arguments.device))]
    if arguments.device == "cuda":
        results += kernel_results(arguments.repeats)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        rows = [result.row() for result in results]
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    show(results, arguments.output)


def cases(device: torch.device) -> Iterator[Case]:
    for bs, seq, num_segments, inner in ((128, 8192, 32, 1), (2, 64, 4, 100)):
        for order in ("random", "contiguous"):
            values, ids = segment_input(bs, seq, num_segments, order, device)
            yield Case(
                "batch_unsorted_segment_sum",
                f"{bs} x {seq}, {num_segments} segments, {order} ids",
                device_name(device),
                "one segment sum a row",
                partial(packing_reference.segment_sum_by_row, values, ids, num_segments),
                partial(batch_unsorted_segment_sum, values, ids, num_segments),
                inner,
            )
            if device.type == "cpu" and inner == 1:
                yield from limits(values, ids, num_segments, f"{bs} x {seq}, {num_segments} segments, {order} ids")
    host = device_name(torch.device("cpu"))
    for bs, seq, inner in ((32, 8192, 1), (2, 64, 20)):
        for lengths in ("full", "ragged"):
            batch = grpo_batch(bs, seq, lengths)
            samples = packing_reference.samples_by_row(*batch)
            for pack_num in (1, 3):
                row: dict[str, Any] = {
                    "pack_num": pack_num,
                    "seq_length": pack_num * (seq + 1),
                    "pad_token_id": PAD_TOKEN_ID,
                }
                groups = create_pack_group(samples, pack_num, row["seq_length"])
                setting = f"{bs} x {seq}, {lengths}, pack_num {pack_num}"
                yield Case(
                    "pack_grpo_data",
                    setting,
                    host,
                    "loop over samples",
                    partial(packing_reference.pack_batch_by_row, *batch, **row),
                    partial(pack_grpo_data, *batch, **row),
                    inner,
                )
                yield Case(
                    "pack_grouped_data",
                    f"{setting}, {len(groups)} calls",
                    host,
                    "loop over samples",
                    partial(pack_each, partial(packing_reference.pack_by_sample, **row), groups),
                    partial(pack_each, partial(pack_grouped_data, **row), groups),
                    inner,
                )


def limits(values: torch.Tensor, ids: torch.Tensor, num_segments: int, setting: str) -> Iterator[Case]:
    """What bounds the segment sum on a CPU, against the same loop: torch's additions alone, and reading the input."""
    loop = partial(packing_reference.segment_sum_by_row, values, ids, num_segments)
    for operation, limit in (
        ("limit: torch's scatter_add alone", partial(scatter_sum, values, ids, num_segments)),
        ("limit: reading values and ids once", lambda: (values.sum(), ids.amax())),
    ):
        yield Case(operation, setting, device_name(values.device), "one segment sum a row", loop, limit)


def pack_each(pack: Callable[[Any], Any], groups: list[Any]) -> list[Any]:
    return [pack(group) for group in groups]


def segment_input(
    bs: int, seq: int, num_segments: int, order: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 values and int64 ids, (bs, seq); `contiguous` ids are sorted in every row, as in a packed row."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(bs, seq, generator=generator)
    ids = torch.randint(0, num_segments, (bs, seq), generator=generator)
    if order == "contiguous":
        ids = ids.sort(dim=1).values
    return values.to(device), ids.to(device)


def grpo_batch(bs: int, seq: int, lengths: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Left-padded prompts in the first half of the columns, right-padded responses in the second."""
    rng = np.random.default_rng(0)
    half, column = seq // 2, np.arange(seq)
    full = np.full((bs, 1), half)
    prompt, response = (full if lengths == "full" else rng.integers(1, half + 1, (bs, 1)) for _ in range(2))
    prompts_mask = ((column >= half - prompt) & (column < half)).astype(np.int64)
    responses_mask = ((column >= half) & (column < half + response)).astype(np.int64)
    return rng.integers(1, 150_000, (bs, seq)), prompts_mask, responses_mask, rng.standard_normal(bs)


def measure(case: Case, repeats: int) -> Result:
    for warm_up in (case.baseline, case.ours) * 3:
        timed(warm_up, case)
    times = np.array([[timed(case.baseline, case), timed(case.ours, case)] for _ in range(repeats)])
    return result(case.operation, case.setting, case.device, case.baseline_name, times[:, 0], times[:, 1])


def timed(function: Callable[[], Any], case: Case) -> float:
    """Milliseconds a call; on a GPU until the last call has finished there."""
    start = time.perf_counter()
    for _ in range(case.inner):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / case.inner


def kernel_results(repeats: int) -> list[Result]:
    """GPU time of the bare kernel, without launch and check, against torch's scatter-add and a copy of its bytes."""
    from verl_pg_plugin.packing.segment_sum_triton import launch_segment_sum

    device = torch.device("cuda")
    block = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    copy_ms = graph_times([lambda: block[: 1 << 29].copy_(block[1 << 29 :])], repeats)
    bytes_per_ms = 2 * (1 << 29) / np.median(copy_ms)
    results = []
    for bs in (128, 2048):
        # Enough copies of the input that none is still in the GPU's cache when its turn comes again.
        values, ids = segment_input(bs, 8192, 32, "random", device)
        copies = [(values.clone(), ids.clone()) for _ in range(1 + (256 << 20) // (12 * values.numel()))]
        kernel = graph_times([partial(launch_segment_sum, *copy, 32) for copy in copies], repeats)
        scatter = graph_times([partial(scatter_sum, *copy, 32) for copy in copies], repeats)
        limit = np.full(repeats, (12 * values.numel() + 4 * bs * 32) / bytes_per_ms)
        setting = f"{bs} x 8192, 32 segments, random ids"
        limit_name = f"copy of the same bytes at {bytes_per_ms / 1e6:.0f} GB/s"
        for name, baseline in (("torch scatter_add", scatter), (limit_name, limit)):
            results.append(result("segment sum kernel", setting, device_name(device), name, baseline, kernel))
    return results


def graph_times(launches: list[Callable[[], Any]], repeats: int) -> np.ndarray:
    """(repeats,) milliseconds a launch on the GPU, out of replays of a graph that holds all launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launches[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(launches))
    return np.array(times)


def result(
    operation: str, setting: str, device: str, baseline_name: str, baseline: np.ndarray, ours: np.ndarray
) -> Result:
    return Result(
        operation,
        setting,
        device,
        baseline_name,
        baseline_ms=Quartiles.of(baseline),
        ours_ms=Quartiles.of(ours),
        ratio=Quartiles.of(baseline / ours),
        repeats=len(ours),
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{models[0].partition(':')[2].strip()}, {len(models)} cores" if models else platform.machine()


def git_commit() -> str:
    """Short commit of this checkout, `+changes` appended where it has been edited, or `none` outside of one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode:
        return "none"
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return commit.stdout.strip() + ("+changes" if changed else "")


def show(results: list[Result], output: Path) -> None:
    table = Table(title=f"packing; times are medians in ms a call; {output}")
    for heading in ("operation", "setting", "device", "baseline", "baseline ms", "ours ms", "ratio (quartiles)"):
        table.add_column(heading, justify="right" if " ms" in heading or "ratio" in heading else "left")
    for line in results:
        ratio = f"{line.ratio.median:.2f} ({line.ratio.q25:.2f}-{line.ratio.q75:.2f})"
        times = f"{line.baseline_ms.median:.4g}", f"{line.ours_ms.median:.4g}"
        table.add_row(line.operation, line.setting, line.device, line.baseline, *times, ratio)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
