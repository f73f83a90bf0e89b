"""Draw how packed mode learned beside the band of the rmpad runs, and count where it lies outside.

    python scripts/plot_learning.py docs/data/learning_cpu.csv --out docs/images/learning_cpu.png

Takes the CSV file of ``learning_curves.py``. At each step the band goes from the lowest to the highest rmpad run. A
value counts as outside when it is further off than 1e-5 of the metric's largest magnitude, the tolerance of every
exactness test here. An independent run of the same training lies outside the band of N runs at 2 of N + 1 steps on
average, half of them for three, so the counts are printed beside that. Runs of one seed are not independent while both
modes draw the same tokens: the lines below the table say until which step they do, by their rewards, and the table how
far they are apart.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

TITLES = {
    "reward": "reward",
    "kl": "KL loss to the reference (nats)",
    "entropy": "entropy (nats)",
    "grad_norm": "gradient norm",
    "rollout_actor_corr": "correlation of rollout's and actor's probabilities",
}
TOLERANCE = 1e-5
LAST_STEPS = 10
FLAT = 1e-3  # a panel shows at least this range: rounding is not to fill it
BASELINE, OURS = "rmpad", "packed"
console = Console(width=150)

Curves = dict[str, dict[int, list[float]]]
"""A metric's values by step, by seed, by mode."""


def read_curves(path: Path, metric: str) -> Curves:
    """The steps that every run has.

    Raises:
        ValueError: one of the two modes has no run, or a run misses a step.
    """
    curves: Curves = {BASELINE: {}, OURS: {}}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["mode"] in curves:
                curve = curves[row["mode"]].setdefault(int(row["seed"]), [])
                if int(row["step"]) != len(curve) + 1:
                    raise ValueError(f"{path}: {row['mode']}, seed {row['seed']}, lacks step {len(curve) + 1}")
                curve.append(float(row[metric]))
    for mode, runs in curves.items():
        if not runs:
            raise ValueError(f"{path} has no {mode} run; make some with scripts/learning_curves.py --modes {mode}")
    shortest = min(len(curve) for runs in curves.values() for curve in runs.values())
    return {mode: {seed: curve[:shortest] for seed, curve in runs.items()} for mode, runs in curves.items()}


@dataclass(frozen=True)
class Comparison:
    """One metric of packed mode against the band of the rmpad runs.

    Attributes:
        steps, runs: of each packed run, and packed runs.
        outside: values of packed runs outside the band, of ``steps * runs``.
        mean_outside: steps at which the mean over packed runs is.
        apart: largest difference between a packed run and the rmpad run of its seed; None without such a pair.
        band: lowest and highest rmpad run at each step.
        last_packed, last_rmpad: for each run the mean over the last steps, sorted.
    """

    metric: str
    steps: int
    runs: int
    outside: int
    mean_outside: int
    apart: float | None
    band: tuple[list[float], list[float]]
    last_packed: list[float]
    last_rmpad: list[float]


def compare(metric: str, curves: Curves) -> Comparison:
    baseline, ours = list(curves[BASELINE].values()), list(curves[OURS].values())
    lowest = [min(values) for values in zip(*baseline, strict=True)]
    highest = [max(values) for values in zip(*baseline, strict=True)]
    slack = TOLERANCE * max(abs(value) for curve in [*baseline, *ours] for value in curve)

    def outside(curve: list[float]) -> int:
        return sum(
            not low - slack <= value <= high + slack for low, value, high in zip(lowest, curve, highest, strict=True)
        )

    pairs = [(curves[BASELINE][seed], curves[OURS][seed]) for seed in curves[BASELINE].keys() & curves[OURS].keys()]
    differences = [abs(stock - other) for pair in pairs for stock, other in zip(*pair, strict=True)]

    def at_last(runs: list[list[float]]) -> list[float]:
        return sorted(fmean(curve[-LAST_STEPS:]) for curve in runs)

    return Comparison(
        metric=metric,
        steps=len(lowest),
        runs=len(ours),
        outside=sum(outside(curve) for curve in ours),
        mean_outside=outside([fmean(values) for values in zip(*ours, strict=True)]),
        apart=max(differences, default=None),
        band=(lowest, highest),
        last_packed=at_last(ours),
        last_rmpad=at_last(baseline),
    )


def steps_together(rewards: Curves, seed: int) -> int:
    """Steps from the first on at which both modes drew responses of one mean reward from this seed."""
    pairs = zip(rewards[BASELINE][seed], rewards[OURS][seed], strict=True)
    together = 0
    for stock, ours in pairs:
        if abs(stock - ours) > TOLERANCE:
            break
        together += 1
    return together


def draw(comparisons: list[Comparison], curves: dict[str, Curves], out: Path) -> None:
    """One panel a metric: the band, rmpad runs as broad lines and packed runs dashed on top, a colour for each seed."""
    figure, axes = plt.subplots(
        len(comparisons), 1, figsize=(8, 2.3 * len(comparisons)), sharex=True, layout="constrained"
    )
    seeds = sorted({seed for runs in curves[comparisons[0].metric].values() for seed in runs})
    colours = {seed: f"C{index}" for index, seed in enumerate(seeds)}
    styles = {BASELINE: {"linewidth": 2.5, "alpha": 0.35}, OURS: {"linewidth": 1.2, "linestyle": "--"}}
    for axis, one in zip(axes, comparisons, strict=True):
        steps = range(1, one.steps + 1)
        band = f"all of {BASELINE}" if len(curves[one.metric][BASELINE]) > 1 else None
        axis.fill_between(steps, *one.band, color="0.9", label=band)
        for mode, style in styles.items():
            for seed, curve in sorted(curves[one.metric][mode].items()):
                axis.plot(steps, curve, color=colours[seed], label=f"{mode}, seed {seed}", **style)
        low, high = axis.get_ylim()
        if high - low < FLAT:
            axis.set_ylim(low - FLAT / 2, high + FLAT / 2)
        axis.set_title(TITLES[one.metric], fontsize=10, loc="left")
        axis.ticklabel_format(useOffset=False)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("training step")
    handles, names = axes[0].get_legend_handles_labels()
    # A seed's two runs below one another, the band last.
    entries = sorted(zip(names, handles, strict=True), key=lambda entry: entry[0].partition(", ")[2] or "~")
    figure.legend(
        [handle for _, handle in entries],
        [name for name, _ in entries],
        fontsize="small",
        frameon=False,
        handlelength=3,
        loc="outside upper left",
        ncols=len(seeds) + 1,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def table_of(comparisons: list[Comparison], num_baseline: int) -> Table:
    by_chance = 2 / (num_baseline + 1)
    table = Table(
        "metric",
        "packed outside the band",
        f"by chance ({by_chance:.0%})",
        "packed mean outside",
        "largest difference, same seed",
        f"packed, last {LAST_STEPS} steps",
        f"rmpad, last {LAST_STEPS} steps",
    )
    for one in comparisons:
        table.add_row(
            one.metric,
            f"{one.outside} of {one.steps * one.runs}",
            f"{by_chance * one.steps * one.runs:.0f}",
            f"{one.mean_outside} of {one.steps}",
            "" if one.apart is None else f"{one.apart:.2g}",
            *(" ".join(f"{value:.4g}" for value in values) for values in (one.last_packed, one.last_rmpad)),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, help="the picture; by default none is drawn")
    args = parser.parse_args()
    try:
        curves = {metric: read_curves(args.csv, metric) for metric in TITLES}
    except (ValueError, OSError) as error:
        parser.exit(1, f"error: {error}\n")
    comparisons = [compare(metric, curves[metric]) for metric in TITLES]
    console.print(table_of(comparisons, len(curves["reward"][BASELINE])))
    for seed in sorted(curves["reward"][BASELINE].keys() & curves["reward"][OURS].keys()):
        console.print(
            f"seed {seed}: the same rewards in both modes up to step {steps_together(curves['reward'], seed)}"
        )
    if args.out:
        draw(comparisons, curves, args.out)
        sys.stdout.write(f"{args.out}\n")


if __name__ == "__main__":
    main()
