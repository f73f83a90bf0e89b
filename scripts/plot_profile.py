"""Draw where the time of a phase goes, path beside path, from the table of ``profile_actor.py``.

    python scripts/plot_profile.py docs/data/profile_4b.csv --out docs/images/profile_4b.png

One bar for each case, phase, path, attention kernel and commit, cut into kernel classes, with the idle time at its end.
The number behind a bar is the wall clock. A bar that is longer than its number had several streams at work at once.
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
from benchmarks.kernel_classes import CLASSES, IDLE

COLORS = (*plt.get_cmap("tab10").colors, (0.85, 0.85, 0.85))  # idle is the palest


@dataclass(frozen=True, eq=False)
class ProfileBar:
    """Seconds by class of one run; ``wall`` is its wall clock."""

    case: str
    phase: str
    path: str
    kernel: str
    commit: str
    seconds: dict[str, float]
    wall: float

    @property
    def label(self) -> str:
        """What ran, and what it ran on if the path does not say so."""
        named = self.kernel == "stock" or f"attention_kernel={self.kernel}" in self.path
        kernel = "" if named else f", {self.kernel}"
        return f"{self.path}{kernel}\n{self.case}, {self.phase}, {self.commit}"


def read_bars(rows: Iterable[dict[str, str]]) -> list[ProfileBar]:
    """One for each run, in the order of the table.

    Raises:
        ValueError: no row says what the device did, or one names a class that there is not.
    """
    bars: dict[tuple[str, str, str, str, str], ProfileBar] = {}
    for row in rows:
        if row["kind"] != "device":
            continue
        if row["name"] not in CLASSES:
            raise ValueError(f"no kernel class {row['name']}: {', '.join(CLASSES)}")
        run = (row["case"], row["phase"], row["path"], row["kernel"], row["commit"])
        bar = bars.setdefault(run, ProfileBar(*run, {}, float(row["seconds_wall"])))
        bar.seconds[row["name"]] = float(row["seconds"])
    if not bars:
        raise ValueError("no row of kind device: is this a table of profile_actor.py?")
    return list(bars.values())


def draw(bars: list[ProfileBar], title: str, out: Path) -> None:
    """A PNG with the legend beside the bars."""
    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.55 * len(bars)), layout="constrained")
    left = [0.0] * len(bars)
    for name, color in zip(CLASSES, COLORS, strict=True):
        widths = [bar.seconds.get(name, 0.0) for bar in bars]
        if any(widths):
            axes.barh(
                range(len(bars)), widths, 0.7, left, color=color, label=name, hatch="//" if name == IDLE else None
            )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, (bar, end) in enumerate(zip(bars, left, strict=True)):
        axes.text(end, place, f" {bar.wall:.3g} s, {bar.seconds.get(IDLE, 0.0) / bar.wall:.0%} idle", va="center")
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(left))
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize="medium")
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, default=Path("outputs/profile.png"))
    args = parser.parse_args()
    with args.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    bars = read_bars(rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about = rows[0]
    draw(bars, f"{about['model']} shape, {about['world_size']} x {about['device']}", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
