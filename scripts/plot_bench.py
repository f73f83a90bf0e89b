"""Draw the speed-ups that ``bench_actor.py`` measured against P:R and against n, with the FLOP bound as a line.

    python scripts/plot_bench.py outputs/bench_actor.csv --out docs/images

Takes any number of CSV files. Writes speedup_against_ratio and speedup_against_n, each as PNG and SVG, with one panel
for each phase. Points are medians with a bar from the slowest to the fastest repeat; the dashed line of the same colour
is the ratio of floating point operations.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from rich.console import Console

PHASES = ("old_log_prob", "ref", "update_actor")


@dataclass(frozen=True)
class Point:
    """One measured case of packed mode, with its kernel and options: speed-up over rmpad, its spread, and the bound."""

    model: str
    kernel: str
    phase: str
    prompt: int
    response: float
    n: int
    speedup: float
    slowest: float
    fastest: float
    bound: float

    @property
    def ratio(self) -> float:
        return self.prompt / self.response

    @classmethod
    def from_row(cls, row: dict[str, str]) -> "Point":
        prompt, response, n, _groups = row["case"].split(",")
        options = row["path"].partition(":")[2].split(",")
        shown = [option for option in options if option and not option.startswith("attention_kernel=")]
        speedup, median = float(row["speedup"]), float(row["seconds_median"])
        return cls(
            model=row["model"],
            kernel=" ".join([row["kernel"], *shown]),
            phase=row["phase"],
            prompt=int(prompt),
            response=float(response.removeprefix("ln:")),
            n=int(n),
            speedup=speedup,
            slowest=speedup * median / float(row["seconds_max"]),
            fastest=speedup * median / float(row["seconds_min"]),
            bound=float(row["flop_bound"]),
        )


def read_points(paths: Iterable[Path]) -> list[Point]:
    """Packed rows that have an rmpad row to be compared with.

    Raises:
        ValueError: there is none.
    """
    paths = list(paths)
    points = []
    for path in paths:
        with path.open() as file:
            rows = [row for row in csv.DictReader(file) if row["path"].partition(":")[0] == "packed"]
        points += [Point.from_row(row) for row in rows if row["speedup"] != "nan"]
    if not points:
        names = ", ".join(map(str, paths))
        raise ValueError(f"{names}: no packed row with a speed-up; run bench_actor.py with --paths rmpad packed")
    return points


def draw(
    points: list[Point], x: Callable[[Point], float], x_label: str, curve: Callable[[Point], str], path: Path
) -> list[Path]:
    """One panel for each phase, one curve for each value of ``curve``; returns the files written."""
    phases = [phase for phase in PHASES if any(point.phase == phase for point in points)]
    figure, panels = plt.subplots(1, len(phases), figsize=(4.6 * len(phases), 3.8), sharey=True, squeeze=False)
    labels = sorted({curve(point) for point in points})
    for panel, phase in zip(panels[0], phases, strict=True):
        curves: dict[str, list[Point]] = defaultdict(list)
        for point in sorted((point for point in points if point.phase == phase), key=x):
            curves[curve(point)].append(point)
        for label, members in curves.items():
            color = f"C{labels.index(label) % 10}"
            places, speedups = [x(point) for point in members], [point.speedup for point in members]
            below = [point.speedup - point.slowest for point in members]
            above = [point.fastest - point.speedup for point in members]
            panel.errorbar(places, speedups, yerr=[below, above], fmt="o-", color=color, capsize=3, label=label)
            panel.plot(places, [point.bound for point in members], "--", color=color, alpha=0.6)
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        panel.set(title=phase, xlabel=x_label)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("speed-up over rmpad (dashed: FLOP bound)")
    panels[0][-1].legend(fontsize="small")
    figure.tight_layout()
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in written:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    points = read_points(args.csv)
    args.out.mkdir(parents=True, exist_ok=True)
    kinds = {(point.model, point.kernel) for point in points}

    def name(point: Point, case: str) -> str:
        return case if len(kinds) == 1 else f"{point.model} {point.kernel} {case}"

    written = draw(
        points, lambda p: p.ratio, "P : R", lambda p: name(p, f"n={p.n}"), args.out / "speedup_against_ratio"
    )
    written += draw(
        points,
        lambda p: p.n,
        "responses per prompt n",
        lambda p: name(p, f"P={p.prompt} R={p.response:g}"),
        args.out / "speedup_against_n",
    )
    for file in written:
        Console().print(str(file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
