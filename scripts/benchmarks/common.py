"""Environment columns, CSV files and tables of all benchmarks. A row is a named tuple of its columns."""

import csv
import gc
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from verl_pg_plugin.compat import installed

PACKAGES = ("torch", "triton", "verl", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4", "vllm", "ray")


def environment() -> dict[str, str]:
    """Return device, driver, package versions and commit (``BENCH_COMMIT`` if there is no git checkout)."""
    cuda = torch.cuda.is_available()
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "device": torch.cuda.get_device_name() if cuda else f"cpu ({torch.get_num_threads()} threads)",
        "driver": subprocess.run(smi, capture_output=True, text=True, check=True).stdout.split()[0] if cuda else "-",
        "versions": " ".join(f"{name}={installed(name) or '-'}" for name in PACKAGES),
        "commit": _commit(),
    }


def free_memory() -> None:
    """Free what deleted engines and models held on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def pinned_copies() -> str:
    """Return GB/s of copies between the GPU and pinned memory, which bound activation levels on the host."""
    host, device = (torch.empty(1 << 30, dtype=torch.uint8, **to) for to in ({"pin_memory": True}, {"device": "cuda"}))
    rates = []
    for to, source in ((host, device), (device, host)):
        to.copy_(source, non_blocking=True)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(16):
            to.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        rates.append(f"{16 * to.nbytes / start.elapsed_time(stop) / 1e6:.1f}")
    return f"pinned copies: {rates[0]} GB/s to the host, {rates[1]} GB/s back"


def _commit() -> str:
    if "BENCH_COMMIT" in os.environ:
        return os.environ["BENCH_COMMIT"]
    command = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return git.stdout.strip() or "unknown"


def write_csv(rows: Sequence[Any], path: Path) -> None:
    """Write ``rows``, named tuples of one type; replace the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([rows[0]._fields, *rows])


def print_table(rows: Sequence[Any], columns: str) -> None:
    """Print some columns of named tuples, floats with four digits."""
    names = columns.split()
    table = Table(*(Column(name, overflow="fold") for name in names))
    for row in rows:
        values = [getattr(row, name) for name in names]
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    Console(width=200, markup=False, highlight=False).print(table)


def with_ratios(rows: Sequence[Any], column: str) -> list[Any]:
    """Return the rows with ``speedup`` and ``memory_ratio`` over rmpad of their model, case, phase and strategy.

    ``column`` has the row's mode, with the strategy after a slash if that is not fsdp2.
    """

    def key(row: Any, mode: str) -> tuple[str, ...]:
        return row.model, row.case, row.phase, mode

    by_mode, result = {key(row, getattr(row, column)): row for row in rows}, []
    for row in rows:
        strategy = next((name for name in ("/fsdp", "/veomni") if name in getattr(row, column)), "")
        if base := by_mode.get(key(row, f"rmpad{strategy}")):
            speedup = base.seconds_median / row.seconds_median if row.seconds_median else row.speedup
            memory_ratio = row.peak_gib / base.peak_gib if base.peak_gib else row.memory_ratio
            row = row._replace(speedup=speedup, memory_ratio=memory_ratio)
        result.append(row)
    return result
