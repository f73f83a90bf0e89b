"""Draw docs/images/chain.png: a group that exceeds a micro-batch, cut into parts that hand over what they share.

python scripts/upkeep/draw_chain.py [--output docs/images/chain.png]
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PARTS = (("responses 1, 2", 2), ("responses 3, 4, 5", 3), ("responses 6, 7, 8", 3))
PREFIX, RESPONSE = 4.0, 1.0
HEIGHT, STEP = 0.8, 1.35
OWN, SHARED, CARRIED = "#4c78a8", "#f58518", "#f9d9b5"


def draw(path: Path) -> None:
    """Two panels, one for each order in which parts run; the first to run stands on top."""
    figure, panels = plt.subplots(2, 1, figsize=(9, 6.4), layout="constrained")
    for axes, training in zip(panels, (False, True), strict=True):
        title = (
            "update: last part first, gradients of the prefix come back"
            if training
            else "old_log_prob, ref, values: first part first, each row once"
        )
        axes.set_title(title, loc="left", fontsize=11, weight="bold")
        order = list(enumerate(PARTS))
        for place, (number, (name, responses)) in enumerate(reversed(order) if training else order):
            y = -place * STEP
            if number == 0:
                _box(axes, 0, y, PREFIX, SHARED, "prompt: computed")
            else:
                _box(axes, 0, y, PREFIX, CARRIED, "prompt: keys and values only")
            for k in range(responses):
                _box(axes, PREFIX + k * RESPONSE, y, RESPONSE, OWN, "")
            axes.text(PREFIX + responses * RESPONSE + 0.15, y + HEIGHT / 2, f"part {number + 1}: {name}", va="center")
            if place:
                arrow = {"arrowstyle": "-|>", "lw": 1.5, "color": "0.2", "shrinkA": 0, "shrinkB": 0}
                ends = (PREFIX / 2, y + HEIGHT), (PREFIX / 2, y + STEP)
                axes.annotate("", *ends, arrowprops=arrow)
                handed = "sums of dK, dV in float32" if training else "K, V"
                axes.text(PREFIX / 2 + 0.15, y + (HEIGHT + STEP) / 2, handed, fontsize=9, va="center")
        if training:
            note = "what a part reads, K and V, comes from a forward without gradient that runs before it"
            axes.text(0, -2 * STEP - 0.35, note, fontsize=9, va="center")
        axes.set(xlim=(-0.1, 10.2), ylim=(-2 * STEP - 0.6, HEIGHT + 0.1))
        axes.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _box(axes: plt.Axes, x: float, y: float, width: float, color: str, text: str) -> None:
    axes.add_patch(plt.Rectangle((x, y), width, HEIGHT, facecolor=color, edgecolor="white"))
    axes.text(x + width / 2, y + HEIGHT / 2, text, ha="center", va="center", fontsize=9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[2] / "docs" / "images" / "chain.png")
    draw(parser.parse_args().output)
