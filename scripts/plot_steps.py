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
    plt.rcParams.update({"font.size": 13})
    figure, axes = plt.subplots(figsize=(7, 1.5 + 0.75 * len(runs)), layout="constrained")
    colors = plt.get_cmap("tab10").colors
    for at, ((case, mode), phases) in enumerate(runs.items()):
        left, step = 0.0, float(phases["step"]["seconds_median"])
        seconds = {name: float(phases[name]["seconds_median"]) for name in PHASES if name in phases}
        seconds["other"] = step - sum(seconds.values())
        for name, color in zip((*PHASES, "other"), colors, strict=False):
            axes.barh(at, seconds.get(name, 0.0), 0.55, left, color=color, label=None if at else name)
            left += seconds.get(name, 0.0)
        axes.text(step, at, f" {step:.1f} s, {float(phases['step']['speedup']):.2f}x", va="center")
        prompt, response, n, prompts = case.split(",")
        axes.text(
            0,
            at - 0.32,
            f"{mode}: prompt {prompt}, response {response}, n {n}, {prompts} prompts",
            va="bottom",
            size=11,
        )
    axes.set_yticks([])
    axes.set_ylim(len(runs) - 0.6, -0.75)
    axes.set_xlim(0, 1.3 * max(float(phases["step"]["seconds_median"]) for phases in runs.values()))
    axes.spines[["top", "right", "left"]].set_visible(False)
    about = rows[0]
    axes.set_xlabel(
        f"seconds of a step: {about['model']} config, {about['num_gpus']} x {about['device'].removeprefix('NVIDIA ')}"
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=12, frameon=False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, default=Path("outputs/steps.png"))
    args = parser.parse_args()
    with args.csv.open(newline="") as file:
        draw(list(csv.DictReader(file)), args.out)
