"""Draw docs/images/packed_rows.png: three responses to a prompt as stock verl computes them, and as packed tokens.

python scripts/upkeep/draw_packed_rows.py [--output docs/images/packed_rows.png]
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from verl_pg_plugin.layout import build_packed_layout

PROMPT, RESPONSES = 5, (3, 2, 4)
PROMPT_COLOR = "#f58518"
RESPONSE_COLORS = ("#4c78a8", "#54a24b", "#b279a2")


def draw(path: Path) -> None:
    """Left the tokens of either way, right which tokens read which."""
    figure, (tokens, mask) = plt.subplots(
        1, 2, figsize=(11, 5.2), layout="constrained", gridspec_kw={"width_ratios": [1.25, 1]}
    )
    _draw_tokens(tokens)
    _draw_mask(mask)
    figure.savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.08)
    plt.close(figure)


def labels_of(response: int) -> list[str]:
    return [f"{'abc'[response]}{k}" for k in range(RESPONSES[response])]


def _draw_tokens(axes: plt.Axes) -> None:
    prompt = [f"p{k}" for k in range(PROMPT)]
    axes.text(0, 5.15, f"stock verl: {sum(RESPONSES) + 3 * PROMPT} tokens, the prompt three times", weight="bold")
    for response in range(3):
        labels = prompt + labels_of(response)
        colors = [PROMPT_COLOR] * PROMPT + [RESPONSE_COLORS[response]] * RESPONSES[response]
        _boxes(axes, 0, 4.1 - response, labels, colors)
    axes.text(0, 1.15, f"packed: {PROMPT - 1 + sum(RESPONSES)} tokens, the prompt once", weight="bold")
    _boxes(axes, 0, 0.1, prompt[:-1], [PROMPT_COLOR] * (PROMPT - 1))
    x = float(PROMPT - 1)
    for response in range(3):
        # The prompt's last token predicts the first of the response, so each response computes its own.
        labels = [prompt[-1], *labels_of(response)[:-1]]
        x += 0.35
        _boxes(axes, x, 0.1, labels, [RESPONSE_COLORS[response]] * len(labels))
        x += len(labels)
    notes = (
        "Each token predicts the one behind it. The prompt's last token predicts the first token\n"
        "of a response, so every response computes it for itself; nothing is predicted from the\n"
        "last token of a response, so it is not computed."
    )
    axes.text(0, -1.15, notes, va="center")
    axes.set(xlim=(-0.2, 14.4), ylim=(-2, 5.6))
    axes.axis("off")


def _boxes(axes: plt.Axes, x: float, y: float, labels: list[str], colors: list[str]) -> None:
    for k, (label, color) in enumerate(zip(labels, colors, strict=True)):
        axes.add_patch(plt.Rectangle((x + k, y), 0.94, 0.8, facecolor=color, edgecolor="white"))
        axes.text(x + k + 0.47, y + 0.4, label, ha="center", va="center", fontsize=9, color="white")


def _draw_mask(axes: plt.Axes) -> None:
    """From the layout itself, so that the image is what the engine does."""
    prompt = list(range(PROMPT))
    sequences = [prompt + [10 * (r + 1) + k for k in range(length)] for r, length in enumerate(RESPONSES)]
    offsets = np.append(0, np.cumsum([len(sequence) for sequence in sequences]))
    layout = build_packed_layout(np.concatenate(sequences), offsets, np.full(3, PROMPT))
    color = np.zeros((layout.num_tokens, layout.num_tokens), dtype=int)
    first = 0
    for segment, (start, length) in enumerate(zip(*layout.segments, strict=True)):
        for query in range(first, first + length):
            color[query, :start] = 1
            color[query, first : query + 1] = segment + 1
        first += length
    axes.imshow(color, cmap=ListedColormap(["#f2f2f2", PROMPT_COLOR, *RESPONSE_COLORS]), vmin=0, vmax=4)
    names = [f"p{k}" for k in range(PROMPT - 1)]
    for response in range(3):
        names += [f"p{PROMPT - 1}", *labels_of(response)[:-1]]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.set(xlabel="keys", ylabel="queries")
    axes.set_title("who reads whom", fontsize=11, weight="bold", loc="left")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[2] / "docs" / "images" / "packed_rows.png"
    parser.add_argument("--output", type=Path, default=default)
    draw(parser.parse_args().output)
