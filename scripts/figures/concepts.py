"""Images of concepts: packed tokens, prefix trees, chunks of a split group. Lengths are examples."""

from collections import Counter
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from figures.style import HOST, OURS, WIDTH, new_axes
from verl_pg_plugin.layout import build_packed_layout

RESPONSE_COLORS = ("#4c78a8", "#54a24b", "#b279a2")
Pieces = Sequence[tuple[str, int]]
"""A sequence as names and token counts."""


def packed_tokens() -> plt.Figure:
    """Draw three responses to a prompt in stock verl and as packed tokens, and the attention mask."""
    prompt, lengths = 5, (3, 2, 4)
    figure, (tokens, mask) = plt.subplots(
        2, 1, figsize=(WIDTH, 9), layout="constrained", gridspec_kw={"height_ratios": [1, 1.6]}
    )
    own = [[f"{'abc'[r]}{k}" for k in range(length)] for r, length in enumerate(lengths)]
    shared = [f"p{k}" for k in range(prompt)]
    tokens.text(0, 5.15, f"stock verl: {sum(lengths) + 3 * prompt} tokens, the prompt three times", weight="bold")
    tokens.text(0, 1.15, f"packed: {prompt - 1 + sum(lengths)} tokens, the prompt once", weight="bold")
    boxes(tokens, 0, 0.1, shared[:-1], [OURS] * (prompt - 1))
    x = float(prompt - 1)
    for response, (labels, color) in enumerate(zip(own, RESPONSE_COLORS, strict=True)):
        boxes(tokens, 0, 4.1 - response, shared + labels, [OURS] * prompt + [color] * len(labels))
        # The prompt's last token predicts the first of the response, so each response computes its own.
        boxes(tokens, x + 0.35, 0.1, [shared[-1], *labels[:-1]], [color] * len(labels))
        x += 0.35 + len(labels)
    tokens.set(xlim=(-0.2, 14.4), ylim=(0, 5.6))
    tokens.axis("off")
    draw_mask(mask, prompt, lengths, [*shared[:-1], *(x for labels in own for x in (shared[-1], *labels[:-1]))])
    return figure


def boxes(axes: plt.Axes, x: float, y: float, labels: list[str], colors: list[str]) -> None:
    for k, (label, color) in enumerate(zip(labels, colors, strict=True)):
        axes.add_patch(plt.Rectangle((x + k, y), 0.94, 0.8, facecolor=color, edgecolor="white"))
        axes.text(x + k + 0.47, y + 0.4, label, ha="center", va="center", color="white")


def draw_mask(axes: plt.Axes, prompt: int, lengths: tuple[int, ...], names: list[str]) -> None:
    """Draw the attention mask of a packed layout."""
    sequences = [[*range(prompt), *(10 * (r + 1) + k for k in range(length))] for r, length in enumerate(lengths)]
    offsets = np.append(0, np.cumsum([len(sequence) for sequence in sequences]))
    layout = build_packed_layout(np.concatenate(sequences), offsets, np.full(len(lengths), prompt))
    color = np.zeros((layout.num_tokens, layout.num_tokens), dtype=int)
    first = 0
    for segment, (start, length) in enumerate(zip(*layout.segments, strict=True)):
        for query in range(first, first + length):
            color[query, :start] = 1
            color[query, first : query + 1] = segment + 1
        first += length
    axes.imshow(color, cmap=ListedColormap(["#f2f2f2", OURS, *RESPONSE_COLORS]), vmin=0, vmax=4)
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(range(len(names)), names)
        set_ticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.set(xlabel="keys", ylabel="queries")
    axes.set_title("who reads whom", weight="bold", loc="left")


def prefix_trees() -> plt.Figure:
    """Draw prefix trees of a group, of prompts with a common beginning and of an agent's sessions."""
    p, q = [("system", 6), ("p", 3)], [("system", 6), ("q", 4)]
    a, b = [("prompt", 8), ("a 1", 3), ("a 2", 3), ("a 3", 3)], [("prompt", 8), ("b 1", 3), ("b 2", 3)]
    cases = {
        "a prompt with its responses": [[("prompt", 8), end] for end in (("a", 4), ("b", 3), ("c", 5))],
        "prompts that begin alike": [[*p, ("a", 4)], [*p, ("b", 3)], [*q, ("c", 4)], [*q, ("d", 3)]],
        "an agent's two sessions, a sequence for each turn": [a[:2], a[:3], a, b[:2], b],
    }
    figure, (axes,) = new_axes(8)
    y = 0.0
    for title, sequences in cases.items():
        axes.text(0, y + 0.2, title, weight="bold")
        y = draw_tree(axes, y - 0.9, sequences)
        total = sum(length for sequence in sequences for _, length in sequence)
        different = sum(node[-1][1] for node in beginnings(sequences))
        axes.text(0, y, f"{total} tokens, {different} different ones: {total / different:.1f} to one", va="top")
        y -= 1.9
    axes.set(xlim=(0, 19), ylim=(y + 1, 1.2))
    axes.axis("off")
    return figure


def beginnings(sequences: Sequence[Pieces]) -> dict[tuple[tuple[str, int], ...], int]:
    """Return the number of sequences through each node, keyed by its path from the root."""
    return Counter(tuple(pieces[: at + 1]) for pieces in sequences for at in range(len(pieces)))


def draw_tree(axes: plt.Axes, y: float, sequences: Sequence[Pieces]) -> float:
    """Draw nodes to the right of their parents, first children in the same line; return y below the last line."""
    gap, lines, ends = 0.6, 1, {}
    for node, readers in beginnings(sequences).items():
        name, length = node[-1]
        x, line, children = ends.get(node[:-1], (-gap, 0, 0))
        ends[node[:-1]] = (x, line, children + 1)
        own = line if not children else lines
        lines += own == lines
        axes.add_patch(
            plt.Rectangle((x + gap, y - own), length, 0.7, color=OURS if readers > 1 else RESPONSE_COLORS[0])
        )
        axes.text(x + gap + length / 2, y - own + 0.35, name, ha="center", va="center", color="white")
        if x > 0:
            above, below = y - line + 0.35, y - own + 0.35
            corners = [x, x + gap / 2, x + gap / 2, x + gap], [above, above, below, below]
            axes.plot(*corners, color="#606060", zorder=0)
        ends[node] = (x + gap + length, own, 0)
    return y - lines + 0.5


def split_group() -> plt.Figure:
    """Draw a group's chunks in a forward, which passes keys and values on, and in an update, which passes sums back."""
    chunks = {"chunk 1": ("1", "2"), "chunk 2": ("3", "4", "5"), "chunk 3": ("6", "7", "8")}
    figure, (axes,) = new_axes(7)
    y = 0.0
    for title, order, handed in (
        ("old_log_prob, ref, values: KV forward", list(chunks), "K, V"),
        ("update: dK/dV back", list(chunks)[::-1], "dK, dV, summed in float32"),
    ):
        axes.text(0, y + 1, title, weight="bold")
        for at, name in enumerate(order):
            color, text = (OURS, "prompt: computed") if name == "chunk 1" else (HOST, "prompt: K, V read")
            axes.add_patch(plt.Rectangle((0, y), 6, 0.8, color=color))
            axes.text(3, y + 0.4, text, ha="center", va="center")
            boxes(axes, 6.05, y, list(chunks[name]), [RESPONSE_COLORS[0]] * len(chunks[name]))
            axes.text(6.2 + len(chunks[name]), y + 0.4, name, va="center")
            if at:
                axes.annotate("", (3, y + 0.85), (3, y + 1.55), arrowprops={"arrowstyle": "-|>", "color": "black"})
                axes.text(3.3, y + 1.2, handed, va="center")
            y -= 1.6
        y -= 0.6
    axes.text(0, y + 1.4, "What a chunk of an update reads comes from a prefill without gradient.", va="center")
    axes.set(xlim=(0, 11), ylim=(y + 1, 1.6))
    axes.axis("off")
    return figure
