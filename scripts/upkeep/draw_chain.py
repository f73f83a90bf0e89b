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
OWN, SHARED, CARRIED = "#4c78a8", "#f58518", "#f9d9b5"


def draw(path: Path) -> None:
    """Two panels, one for each order in which parts run."""
    figure, panels = plt.subplots(2, 1, figsize=(9, 5.2))
    for axes, training in zip(panels, (False, True), strict=True):
        axes.set_title(
            "update: last part first, gradients of the prefix come back"
            if training
            else "old_log_prob, ref, values: first part first, each row once",
            loc="left",
            fontsize=11,
        )
        for number, (name, responses) in enumerate(PARTS):
            y = (number if training else len(PARTS) - 1 - number) * 1.2
            if number == 0:
                _box(axes, 0, y, PREFIX, SHARED, "prompt: computed")
            else:
                _box(axes, 0, y, PREFIX, CARRIED, "prompt: keys and values only")
            for k in range(responses):
                _box(axes, PREFIX + k * RESPONSE, y, RESPONSE, OWN, "")
            axes.text(PREFIX + responses * RESPONSE + 0.15, y + 0.4, f"part {number + 1}: {name}", va="center")
            if number:
                start = y + 1.0 if not training else y - 0.2
                axes.annotate(
                    "",
                    xy=(PREFIX / 2, start if not training else y - 0.2),
                    xytext=(PREFIX / 2, start + 0.2 if not training else y),
                    arrowprops={"arrowstyle": "->", "lw": 1.5},
                )
        order = "top to bottom"
        note = "K, V" if not training else "float32 sums of dK, dV; K, V come from a forward without gradient"
        axes.text(0, -0.45, f"runs {order}; handed down: {note}", fontsize=9)
        axes.set_xlim(-0.1, 10.5)
        axes.set_ylim(-0.6, len(PARTS) * 1.2)
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _box(axes: plt.Axes, x: float, y: float, width: float, color: str, text: str) -> None:
    axes.add_patch(plt.Rectangle((x, y), width, 0.8, facecolor=color, edgecolor="white"))
    axes.text(x + width / 2, y + 0.4, text, ha="center", va="center", fontsize=9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[2] / "docs" / "images" / "chain.png")
    draw(parser.parse_args().output)
