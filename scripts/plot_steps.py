"""Draw where the seconds of a training step go, mode beside mode, from the table of ``bench_step.py``.

    python scripts/plot_steps.py docs/data/step_4b.csv --out docs/images/steps.png

One bar for each case and mode, cut into the phases that verl times; what a step does beside them is "other". The number
behind a bar is the whole step, and its ratio to rmpad in the same run.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

PHASES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
WIDTH = 0.36  # of a bar; a case is one apart from the next


@dataclass(frozen=True, eq=False)
class StepBar:
    """Median seconds of each phase and of the step, and the step's ratio to rmpad."""

    case: str
    mode: str
    seconds: dict[str, float]
    step: float
    speedup: float

    @property
    def other(self) -> float:
        return self.step - sum(self.seconds.values())


def read_bars(rows: Iterable[dict[str, str]]) -> list[StepBar]:
    """One for each case and mode, in the order of the table.

    Raises:
        ValueError: a run has no row of its step.
    """
    runs: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        runs.setdefault((row["case"], row["mode"]), {})[row["phase"]] = row
    bars = []
    for (case, mode), phases in runs.items():
        if "step" not in phases:
            raise ValueError(f"{case} {mode}: no row of the whole step")
        seconds = {name: float(phases[name]["seconds_median"]) for name in PHASES if name in phases}
        step = phases["step"]
        bars.append(StepBar(case, mode, seconds, float(step["seconds_median"]), float(step["speedup"])))
    return bars


def draw(bars: list[StepBar], title: str, out: Path) -> None:
    cases = list(dict.fromkeys(bar.case for bar in bars))
    modes = list(dict.fromkeys(bar.mode for bar in bars))
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.5 * len(bars)), layout="constrained")
    at = {bar: cases.index(bar.case) + WIDTH * (modes.index(bar.mode) - (len(modes) - 1) / 2) for bar in bars}
    left = dict.fromkeys(bars, 0.0)
    for name, color in zip((*PHASES, "other"), plt.get_cmap("tab10").colors, strict=False):
        widths = [bar.other if name == "other" else bar.seconds.get(name, 0.0) for bar in bars]
        axes.barh([at[bar] for bar in bars], widths, 0.9 * WIDTH, [left[bar] for bar in bars], color=color, label=name)
        left = {bar: left[bar] + width for bar, width in zip(bars, widths, strict=True)}
    for bar in bars:
        axes.text(bar.step, at[bar], f" {bar.step:.1f} s, {bar.speedup:.2f}x", va="center")
    axes.set_yticks(list(at.values()), [f"{_named(bar.case)}\n{bar.mode}" for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(bar.step for bar in bars))
    axes.set_xlabel("seconds of a training step (median)")
    axes.set_title(title, fontsize="medium")
    figure.legend(loc="outside lower center", ncols=len(PHASES) + 1, fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def _named(case: str) -> str:
    prompt, response, n, prompts = case.split(",")
    return f"{prompts} x {n}, P {prompt}, R {response}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, default=Path("outputs/steps.png"))
    args = parser.parse_args()
    with args.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about = rows[0]
    title = f"{about['model']} shape, {about['num_gpus']} x {about['device']}, rollout {about['rollout']}"
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))  # in the order of the cases
    draw(read_bars(rows), f"{title} (commits of the cases: {commits})", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
