"""Draw where the seconds of a training step go, mode beside mode, from the table of ``bench_step.py``.

    python scripts/plot_steps.py docs/data/step_4b.csv --out docs/images/steps.png

One bar for each case and mode, cut into the phases that verl times; what a step does beside them is "other". The number
behind a bar is the whole step, and its ratio to rmpad in the same run.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

PHASES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")


def draw(rows: list[dict[str, str]], out: Path) -> None:
    """A run without a row of its step is a KeyError."""
    runs: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        runs.setdefault((row["case"], row["mode"]), {})[row["phase"]] = row
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.5 * len(runs)), layout="constrained")
    colors = plt.get_cmap("tab10").colors
    for at, phases in enumerate(runs.values()):
        left, step = 0.0, float(phases["step"]["seconds_median"])
        seconds = {name: float(phases[name]["seconds_median"]) for name in PHASES if name in phases}
        seconds["other"] = step - sum(seconds.values())
        for name, color in zip((*PHASES, "other"), colors, strict=False):
            axes.barh(at, seconds.get(name, 0.0), 0.8, left, color=color, label=None if at else name)
            left += seconds.get(name, 0.0)
        axes.text(step, at, f" {step:.1f} s, {float(phases['step']['speedup']):.2f}x", va="center")
    axes.set_yticks(range(len(runs)), [f"P, R, n, prompts: {case}\n{mode}" for case, mode in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(float(phases["step"]["seconds_median"]) for phases in runs.values()))
    axes.set_xlabel("seconds of a training step (median)")
    about, commits = rows[0], ", ".join(dict.fromkeys(row["commit"] for row in rows))  # in the order of the cases
    title = f"{about['model']} config, {about['num_gpus']} x {about['device']}, rollout {about['rollout']}"
    axes.set_title(f"{title} (commits of the cases: {commits})", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=len(PHASES) + 1, fontsize="small", frameon=False)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, default=Path("outputs/steps.png"))
    args = parser.parse_args()
    with args.csv.open(newline="") as file:
        draw(list(csv.DictReader(file)), args.out)
