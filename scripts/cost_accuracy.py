"""How well the cost model predicts what ``bench_actor.py`` measured.

    python scripts/cost_accuracy.py [--csv docs/data/actor_*.csv]

FLOPs are counted anew from model and case, every rank of a case with the balance its trainer would give it. "rank" is
Spearman's correlation of the FLOPs of the slowest rank with the seconds, over all cases of one device and phase, stock
verl's included. "error" is the median of ``|predicted / measured - 1|`` for the speed-up over rmpad in the same file:
once over all paths that share prefixes, once over packed mode as it comes (no compiled layers, the kernel of stock
verl), which is what the FLOPs describe.
"""

from __future__ import annotations

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl is imported: its platform is chosen once

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from benchmarks.actor_cases import Case, Work, rows_of_ranks
from benchmarks.shapes import SHAPES, config_of_shape
from rich.console import Console
from rich.table import Table

from verl_pg_plugin.cost.flops import ModelFlops

DATA = Path(__file__).parents[1] / "docs/data"
PHASES = ("old_log_prob", "update_actor")
STOCK = ("rmpad", "padded")
AS_IT_COMES = ("packed", "packed:attention_kernel=flash_attn_2")


@dataclass(frozen=True)
class Measurement:
    """A line of a benchmark's file, and what the cost model says about it.

    Attributes:
        flops: of the slowest rank.
        predicted, measured: speed-up over rmpad.
    """

    device: str
    phase: str
    path: str
    seconds: float
    flops: float
    predicted: float
    measured: float


@cache
def work_of(model: str, case_name: str, stock: bool, world_size: int) -> Work:
    """FLOPs of the case on every rank, as ``bench_actor.py`` ran it."""
    flops = ModelFlops.of_config(config_of_shape(model))
    samples, group = Case.parse(case_name).samples(SHAPES[model]["vocab_size"], world_size)
    parts = rows_of_ranks(samples, group, stock, flops, world_size)
    return Work.of([[samples[row] for row in part] for part in parts], flops, checkpointing=True)


def read(path: Path) -> list[Measurement]:
    """The phases of one file that the table is about."""
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["phase"] not in PHASES:
                continue
            stock, phase = row["path"] in STOCK, row["phase"]
            work = work_of(row["model"], row["case"], stock, int(row["world_size"]))
            done = (work.alone if stock else work.packed)[phase]
            found.append(
                Measurement(
                    device=row["device"],
                    phase=phase,
                    path=row["path"],
                    seconds=float(row["seconds_median"]),
                    flops=max(done),
                    predicted=sum(work.alone[phase]) / sum(done),
                    measured=float(row["speedup"]),
                )
            )
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks, equal values sharing their mean rank."""
    return float(np.corrcoef(*(_ranks(np.array(values)) for values in (a, b)))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def median_error(measurements: list[Measurement]) -> str:
    errors = [abs(m.predicted / m.measured - 1) for m in measurements]
    return f"{statistics.median(errors):.1%} ({len(errors)})" if errors else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, nargs="+", default=sorted(DATA.glob("actor_*.csv")))
    measurements = [m for path in parser.parse_args().csv for m in read(path)]
    table = Table("device", "phase", "cases", "rank", "error, shared prefixes", "error, packed as it comes")
    for device in dict.fromkeys(m.device for m in measurements):
        for phase in PHASES:
            those = [m for m in measurements if (m.device, m.phase) == (device, phase)]
            if len(those) < 2:
                continue
            table.add_row(
                device,
                phase,
                str(len(those)),
                f"{spearman([m.flops for m in those], [m.seconds for m in those]):.3f}",
                median_error([m for m in those if m.path not in STOCK]),
                median_error([m for m in those if m.path in AS_IT_COMES]),
            )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
