"""How well the cost model predicts what ``bench_actor.py`` measured.

    python scripts/cost_accuracy.py [--csv FILE ...]

The files are those of docs/data that hold speed-ups of text models over stock verl.

FLOPs are counted anew from model and case, every rank of a case with the balance its trainer would give it. "rank" is
Spearman's correlation of the FLOPs of the slowest rank with the seconds, over all cases of one device and phase, stock
verl's included. "error" is the median of ``|predicted / measured - 1|`` for the speed-up over rmpad in the same file:
once of plain FLOPs over packed mode as it comes (no compiled layers, the kernel of stock verl), once of the forecast
(``verl_pg_plugin/cost/forecast.py``, which ``estimate`` shows) over packed mode with all its options and budgets.
Padded groups have no forecast, and neither has a CPU, where stock verl attends over a dense mask of all tokens.
``--cases`` lists every case.
"""

from __future__ import annotations

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl is imported: its platform is chosen once

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from benchmarks.actor_cases import CaseRows, Work, parse_case, rows_of_ranks
from benchmarks.shapes import SHAPES, config_of
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig
from verl_pg_plugin.cost.row_memory import RowMemory

from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.cost.forecast import Batch, Settings, forecast
from verl_pg_plugin.cost.kept_layers import KeptBudget, LayerActivations

DATA = Path(__file__).parents[1] / "docs/data"
PHASES = ("old_log_prob", "update_actor")
STOCK = ("rmpad", "padded")
USUAL_BUDGET = 20480
BUDGETS = {"actor_8b_budget_81920": 81920, "actor_4b_p32768": 40960}
"""``--max-token-len`` of bench_actor.py in files that were made with another."""
LAYERS = {"moe_30b_a3b_12_layers": 12, "moe_30b_a3b_36_layers": 36, "hybrid_9b": 32}
"""Layers of the models in files beside those of dense text models."""
FILES = [*sorted(DATA.glob("actor_*.csv")), *(DATA / f"{name}.csv" for name in LAYERS)]
PLAIN = ("packed", "packed:compile_layers=False", "packed:attention_kernel=flash_attn_2")


@dataclass(frozen=True)
class Measurement:
    """A line of a benchmark's file, and what the cost model says about it.

    Attributes:
        flops: of the slowest rank.
        predicted, measured: speed-up over rmpad.
        forecast: predicted with the cuts of its budget and with its options; None where there is none.
        case: of the benchmark.
    """

    device: str
    phase: str
    path: str
    compiled: bool
    seconds: float
    flops: float
    predicted: float
    measured: float
    forecast: float | None
    case: str


@dataclass(frozen=True)
class Shape:
    """A model of a file, some of its layers left away where the file was made so."""

    name: str
    layers: int | None

    @cached_property
    def config(self) -> PretrainedConfig:
        config = config_of(self.name)
        if self.layers is not None:
            config.num_hidden_layers = self.layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: self.layers]
        return config

    @cached_property
    def flops(self) -> ModelFlops:
        return ModelFlops.of_config(self.config)

    def rows(self, case_name: str, world_size: int) -> CaseRows:
        return parse_case(case_name).rows(SHAPES[self.name]["vocab_size"], world_size)


@cache
def prices_of(model: Shape, case_name: str, stock: bool, world_size: int, settings: Settings) -> list[dict[str, float]]:
    """Price of each phase on every rank: of stock verl with its own balance, or shared with ours."""
    config, flops = model.config, model.flops
    rows = model.rows(case_name, world_size)
    samples = rows.samples
    keeps = not settings.recompute_attention
    memory = RowMemory.of(config, torch.bfloat16, settings.checkpointing, keeps, settings.kernel)
    prices = []
    for part in rows_of_ranks(rows, stock, flops, world_size):
        lengths = [len(samples[row].prompt) + len(samples[row].response) for row in part]
        batch = Batch(
            tokens=np.concatenate([[*samples[row].prompt, *samples[row].response] for row in part]),
            offsets=np.append(0, np.cumsum(lengths)),
            prompt_lengths=np.array([len(samples[row].prompt) for row in part]),
        )
        found = forecast(batch, flops, memory, settings)
        log_prob, update = found.alone
        if not stock:
            log_prob, update = log_prob / found.old_log_prob, update / found.update
        prices.append({"old_log_prob": log_prob, "update_actor": update})
    return prices


def forecast_of(file: Path, row: dict[str, str]) -> float | None:
    """Speed-up that the forecast gives a line of a file: the slowest rank of stock verl over the slowest of ours."""
    path, _, own_budget = row["path"].partition("@")
    if row["device"].startswith("cpu") or not path.startswith("packed"):
        return None
    options = dict(option.split("=") for option in path.partition(":")[2].split(",") if option)
    if options.get("keep_activations") in ("mlp", "auto"):
        return None  # there is no forecast of layers that keep a part, nor of what memory will be free
    stock = Settings(BUDGETS.get(file.stem, USUAL_BUDGET))
    shared = Settings(
        int(own_budget or stock.budget),
        carry=options.get("carry") != "never",
        recompute_attention=options.get("recompute_attention") == "True",
        # Files from before layers were compiled by default do not say whether they were.
        compile_layers=row.get("layers_compiled", options.get("compile_layers")) == "True",
        kernel=row["kernel"],
    )
    model, case, ranks, phase = shape_of(file, row), row["case"], int(row["world_size"]), row["phase"]
    if (asked := options.get("keep_activations", "attention")) != "attention":
        layer, gib = LayerActivations.of(model.config, torch.bfloat16), float("inf") if asked == "all" else float(asked)
        shared = replace(shared, kept=KeptBudget(layer, model.config.num_hidden_layers, gib))
    alone = max(price[phase] for price in prices_of(model, case, True, ranks, stock))
    return alone / max(price[phase] for price in prices_of(model, case, False, ranks, shared))


@cache
def shape(name: str, layers: int | None) -> Shape:
    return Shape(name, layers)


def shape_of(file: Path, row: dict[str, str]) -> Shape:
    """The model of a line, the same object for the same model."""
    return shape(row["model"], LAYERS.get(file.stem))


@cache
def work_of(model: Shape, case_name: str, stock: bool, world_size: int) -> Work:
    """FLOPs of the case on every rank, as ``bench_actor.py`` ran it."""
    rows = model.rows(case_name, world_size)
    parts = rows_of_ranks(rows, stock, model.flops, world_size)
    return Work.of([[rows.samples[row] for row in part] for part in parts], model.flops, checkpointing=True)


def read(path: Path) -> list[Measurement]:
    """The phases of one file that the table is about."""
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["phase"] not in PHASES:
                continue
            stock, phase = row["path"] in STOCK, row["phase"]
            work = work_of(shape_of(path, row), row["case"], stock, int(row["world_size"]))
            done = (work.alone if stock else work.packed)[phase]
            found.append(
                Measurement(
                    device=row["device"],
                    phase=phase,
                    path=row["path"],
                    compiled=row.get("layers_compiled") == "True",
                    seconds=float(row["seconds_median"]),
                    flops=max(done),
                    predicted=sum(work.alone[phase]) / sum(done),
                    measured=float(row["speedup"]),
                    forecast=forecast_of(path, row),
                    case=f"{row['model']} {row['case']} on {row['world_size']}",
                )
            )
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks, equal values sharing their mean rank."""
    return float(np.corrcoef(*(_ranks(np.array(values)) for values in (a, b)))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def forecast_errors(measurements: list[Measurement]) -> list[float]:
    """Relative errors of the forecast, signed, of those that have one."""
    return [m.forecast / m.measured - 1 for m in measurements if m.forecast is not None]


def median_error(errors: Sequence[float]) -> str:
    errors = [abs(error) for error in errors]
    return f"{statistics.median(errors):.1%} ({len(errors)})" if errors else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, nargs="+", default=FILES)
    parser.add_argument("--cases", action="store_true", help="list the forecast of every case")
    args = parser.parse_args()
    measurements = [m for path in args.csv for m in read(path)]
    table = Table("device", "phase", "cases", "rank", "error of FLOPs, as it comes", "error of the forecast")
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
                median_error([m.predicted / m.measured - 1 for m in those if m.path in PLAIN and not m.compiled]),
                median_error(forecast_errors(those)),
            )
    console = Console(width=120)
    console.print(table)
    if args.cases:
        console.print(table_of_cases([m for m in measurements if m.forecast is not None]))
    return 0


def table_of_cases(measurements: list[Measurement]) -> Table:
    """Predicted and measured speed-up of each."""
    table = Table("case", "path", "phase", "measured", "predicted", "error", box=None)
    for m in measurements:
        assert m.forecast is not None
        error = m.forecast / m.measured - 1
        table.add_row(m.case, m.path, m.phase, f"{m.measured:.2f}x", f"{m.forecast:.2f}x", f"{error:+.1%}")
    return table


if __name__ == "__main__":
    sys.exit(main())
