"""Draw the speed-ups that ``bench_actor.py`` measured against P:R and against n, with the FLOP bound as a line.

    python scripts/plot_bench.py outputs/bench_actor.csv --out docs/images

Takes any number of CSV files, and of their cases those without a name (``plot_turns.py`` draws agents). Writes
speedup_against_ratio and speedup_against_n, each as PNG and SVG, with one panel for each phase. Points are medians with
a bar from the slowest to the fastest repeat; the dotted line of the same colour is the ratio of floating point
operations, which a setup that compiles layers can pass: stock verl cannot compile them.
"""

import argparse
import csv
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.container import ErrorbarContainer
from rich.console import Console

MARKERS = "osD^v<>"
LINES = ("-", "--", "-.")
PHASES = ("old_log_prob", "ref", "update_actor")


@dataclass(frozen=True)
class Point:
    """One measured case of packed mode, with its kernel and options: speed-up over rmpad, its spread, and the bound."""

    model: str
    kernel: str
    phase: str
    case: str
    speedup: float
    slowest: float
    fastest: float
    bound: float

    @property
    def setup(self) -> str:
        """Model, kernel and options."""
        return f"{self.model} {self.kernel}"

    @classmethod
    def from_row(cls, row: dict[str, str]) -> "Point":
        options = row["path"].partition(":")[2].split(",")
        shown = [option for option in options if option and not option.startswith("attention_kernel=")]
        speedup, median = float(row["speedup"]), float(row["seconds_median"])
        return cls(
            model=row["model"],
            kernel=" ".join([row["kernel"], *shown]),
            phase=row["phase"],
            case=row["case"],
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
    points: list[Point],
    x: Callable[[str], float],
    x_label: str,
    curve: Callable[[str], str],
    path: Path,
    note: str = "",
) -> list[Path]:
    """One panel for each phase, one curve for each value of ``curve`` and setup; returns the files written.

    Colours tell cases apart, markers and kinds of line setups. Of each case the bound is drawn once, dotted and in its
    colour: it is the same for every setup. A case with one place on the axis is no curve and is left out. What all
    setups have in common is the title and not in every name.

    Args:
        points: what was measured.
        x, curve: of a case, its place on the axis and the name of its curve.
        x_label: of the axis.
        path: of the files, whatever its suffix.
        note: lines below the panels.

    Raises:
        ValueError: no case has two places.
    """
    places: dict[str, set[float]] = defaultdict(set)
    for point in points:
        places[curve(point.case)].add(x(point.case))
    points = [point for point in points if len(places[curve(point.case)]) > 1]
    if not points:
        raise ValueError(f"no case was measured at two values of {x_label}, so there is no curve to draw")
    phases = [phase for phase in PHASES if any(point.phase == phase for point in points)]
    cases, setups = sorted({curve(point.case) for point in points}), sorted({point.setup for point in points})
    words = zip(*(setup.split() for setup in setups), strict=False)
    common = " ".join(word[0] for word in itertools.takewhile(lambda word: len(set(word)) == 1, words))
    places_drawn = sorted({x(point.case) for point in points})
    figure, panels = plt.subplots(
        1, len(phases), figsize=(3.1 * len(phases) + 2.5, 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    figure.suptitle(common, x=0.01, ha="left", fontsize="medium")
    for panel, phase in zip(panels[0], phases, strict=True):
        for color, case in enumerate(cases):
            members = sorted((p for p in points if (p.phase, curve(p.case)) == (phase, case)), key=lambda p: x(p.case))
            bounds = {x(point.case): point.bound for point in members}
            line = {"linestyle": ":", "linewidth": 2.2, "alpha": 0.8, "zorder": 1}
            panel.plot(list(bounds), list(bounds.values()), color=f"C{color}", label=f"{case}: FLOP bound", **line)
            for marker, setup in enumerate(setups):
                measured = [point for point in members if point.setup == setup]
                if not measured:
                    continue
                speedups = [point.speedup for point in measured]
                panel.errorbar(
                    [x(point.case) for point in measured],
                    speedups,
                    yerr=[[p.speedup - p.slowest for p in measured], [p.fastest - p.speedup for p in measured]],
                    marker=MARKERS[marker % len(MARKERS)],
                    linestyle=LINES[marker % len(LINES)],
                    color=f"C{color}",
                    capsize=3,
                    elinewidth=0.8,
                    label=f"{case}: {setup[len(common) :].strip() or 'packed'}",
                )
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(places_drawn, [f"{place:g}" for place in places_drawn])
        panel.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        panel.set(title=phase, xlabel=x_label)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("speed-up over rmpad")
    # A case's bound and its curves stand together, without bars.
    handles, names = panels[0][-1].get_legend_handles_labels()
    entries = sorted(zip(names, handles, strict=True), key=lambda entry: entry[0].partition(":")[0])
    figure.legend(
        [handle[0] if isinstance(handle, ErrorbarContainer) else handle for _, handle in entries],
        [name for name, _ in entries],
        fontsize="small",
        handlelength=3.5,
        loc="outside right upper",
    )
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize="small")
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in written:
        figure.savefig(file, dpi=150)
    plt.close(figure)
    return written


def _sizes(case: str) -> tuple[int, float, int]:
    """P, R and n."""
    prompt, response, n, _groups = case.split(",")
    return int(prompt), float(response.removeprefix("ln:")), int(n)


def _ratio(case: str) -> float:
    prompt, response, _ = _sizes(case)
    return prompt / response


def _name(case: str) -> str:
    prompt, response, _ = _sizes(case)
    return f"P={prompt} R={response:g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    points = [point for point in read_points(args.csv) if point.case[0].isdigit()]
    args.out.mkdir(parents=True, exist_ok=True)
    written = draw(points, _ratio, "P : R", lambda case: f"n={_sizes(case)[2]}", args.out / "speedup_against_ratio")
    written += draw(
        points, lambda case: _sizes(case)[2], "responses per prompt n", _name, args.out / "speedup_against_n"
    )
    for file in written:
        Console().print(str(file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
