"""Draw the curves of one training or several from the metrics file of verl's ``file`` logger.

    python scripts/plot_training.py METRICS.jsonl [OTHER.jsonl ...] --out outputs/training.png

One panel for each of ``--metrics`` that some run logs, one line for each run, named after its ``--names`` or the folder
of its file. With ``--smooth N`` a broad pale line is a metric as it was logged and a thin one its mean over the last N
steps. A metric that only some steps log (validation) has marks at these. ``--list`` prints the names of all.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

DEFAULT = (
    "critic/score/mean",
    "response_length/mean",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "timing_s/step",
    "timing_s/update_actor",
    "actor/prefix_grouper/dedup_ratio",
)
"""What is drawn where nothing is asked for, as far as a run logs it."""
COLUMNS = 2
LINES = ("-", (0, (4, 2)), (0, (1, 1)))  # runs that log the same are seen below one another
LEAST_RANGE = 1e-3  # of a panel, relative to its values: rounding is not to fill it


@dataclass(frozen=True)
class Run:
    """A training: each metric's (step, value) pairs in the order of steps, values that are numbers alone."""

    name: str
    metrics: dict[str, list[tuple[int, float]]]


def read_run(path: Path, name: str) -> Run:
    """The metrics of a file, of which a run that was resumed may have some steps twice: the later counts.

    Raises:
        ValueError: the file is missing, holds no step, or a line in it is no step of verl's logger.
    """
    if not path.is_file():
        raise ValueError(f'{path} does not exist; train with trainer.logger=["console","file"]')
    steps: dict[int, dict[str, float]] = {}
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            step, data = int(row["step"]), dict(row["data"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError):
                break  # the run is still writing it
            raise ValueError(f"{path}, line {number}: no step of verl's file logger ({error!r})") from error
        steps.setdefault(step, {}).update(data)
    if not steps:
        raise ValueError(f"{path} holds no step yet")
    metrics: dict[str, list[tuple[int, float]]] = {}
    for step, values in sorted(steps.items()):
        for metric, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                metrics.setdefault(metric, []).append((step, float(value)))
    return Run(name, metrics)


def smoothed(values: list[float], window: int) -> list[float]:
    """The mean of each value with those before it, ``window`` in all; fewer at the beginning."""
    return [fmean(values[max(0, at + 1 - window) : at + 1]) for at in range(len(values))]


def draw(runs: list[Run], metrics: list[str], window: int, out: Path) -> None:
    """One panel a metric, one colour and kind of line a run; the legend stands above the panels."""
    rows = -(-len(metrics) // COLUMNS)
    figure, panels = plt.subplots(
        rows, min(COLUMNS, len(metrics)), figsize=(9.5, 0.6 + 2.1 * rows), squeeze=False, layout="constrained"
    )
    for panel, metric in zip(panels.flat, metrics, strict=False):
        for number, run in enumerate(runs):
            if metric not in run.metrics:
                continue
            steps, values = map(list, zip(*run.metrics[metric], strict=True))
            line = {"color": f"C{number}", "linestyle": LINES[number % len(LINES)], "linewidth": 1.4}
            if len(steps) < max(map(len, run.metrics.values())):
                panel.plot(steps, values, **line, marker="o", markersize=4)
            elif window > 1:
                panel.plot(steps, values, color=line["color"], linewidth=2.5, alpha=0.3)
                panel.plot(steps, smoothed(values, window), **line)
            else:
                panel.plot(steps, values, **line)
        low, high = panel.get_ylim()
        margin = LEAST_RANGE * max(abs(low), abs(high)) - (high - low)
        if margin > 0:
            panel.set_ylim(low - margin / 2, high + margin / 2)
        panel.set_title(metric, fontsize="medium", loc="left")
        panel.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        panel.ticklabel_format(axis="y", useOffset=False)
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(metrics) :]:
        panel.set_visible(False)
    for panel in panels.flat[max(0, len(metrics) - COLUMNS) : len(metrics)]:
        panel.set_xlabel("training step")
    handles = [
        matplotlib.lines.Line2D([], [], color=f"C{number}", linestyle=LINES[number % len(LINES)], label=run.name)
        for number, run in enumerate(runs)
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize="small", frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jsonl", nargs="+", type=Path)
    parser.add_argument("--names", nargs="+", help="of the runs, as many as files")
    parser.add_argument("--metrics", nargs="+", help="names as they are in the file")
    parser.add_argument("--smooth", type=int, default=1, help="steps of a moving mean (1: none)")
    parser.add_argument("--out", type=Path, default=Path("outputs/training.png"))
    parser.add_argument("--list", action="store_true", help="print the names of all metrics and draw nothing")
    args = parser.parse_args()
    if args.names and len(args.names) != len(args.jsonl):
        parser.error(f"{len(args.jsonl)} files and {len(args.names)} --names")
    if args.smooth < 1:
        parser.error(f"--smooth={args.smooth} is below 1")
    return args


def main() -> int:
    args = parse_args()
    names = args.names or [path.resolve().parent.name for path in args.jsonl]
    try:
        runs = [read_run(path, name) for path, name in zip(args.jsonl, names, strict=True)]
        logged = sorted({metric for run in runs for metric in run.metrics})
        if unknown := sorted(set(args.metrics or ()) - set(logged)):
            raise ValueError(f"no run logs {', '.join(unknown)}; --list names what they log")
        metrics = args.metrics or [metric for metric in DEFAULT if metric in logged]
        if not metrics:
            raise ValueError(f"no run logs any of {', '.join(DEFAULT)}; choose from --list with --metrics")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if args.list:
        sys.stdout.write("".join(f"{metric}\n" for metric in logged))
        return 0
    draw(runs, metrics, args.smooth, args.out)
    sys.stdout.write(f"{args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
