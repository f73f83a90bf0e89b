"""Draw docs/images/tries.png: what responses, prompts that begin alike and turns of a session share.

python scripts/upkeep/draw_tries.py [--output docs/images/tries.png]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHARED, OWN = "#f58518", "#4c78a8"
HEIGHT, GAP = 0.62, 0.5


@dataclass(frozen=True)
class Segment:
    """Tokens in a row, the sequences that end with them, and what goes on behind them."""

    name: str
    tokens: int
    children: tuple[Segment, ...] = ()
    ends: int = 0


def _responses(*names: str) -> tuple[Segment, ...]:
    return tuple(Segment(name, tokens, ends=1) for name, tokens in zip(names, (4, 3, 5), strict=False))


def _turns(*names: str) -> tuple[Segment, ...]:
    """What a tool said and the reply to it; each turn's row begins with all rows before it."""
    return (Segment(names[0], 3, _turns(*names[1:]), ends=1),) if names else ()


PREAMBLE = (Segment("p", 3, _responses("a", "b")), Segment("q", 4, _responses("c", "d")))
TRIES = (
    ("a prompt with its responses", Segment("prompt", 8, _responses("a", "b", "c"))),
    ("prompts that begin alike", Segment("system", 5, PREAMBLE)),
    ("sessions, a sequence for each turn", Segment("prompt", 5, _turns("a 1", "a 2", "a 3") + _turns("b 1", "b 2"))),
)


def lines(segment: Segment) -> int:
    return sum(map(lines, segment.children)) or 1


def sequences(segment: Segment) -> int:
    """That read it."""
    return segment.ends + sum(map(sequences, segment.children))


def different_tokens(segment: Segment) -> int:
    """Tokens of it and of all that go on from it, each once."""
    return segment.tokens + sum(map(different_tokens, segment.children))


def tokens_alone(segment: Segment) -> int:
    """The same, with each sequence by itself."""
    return sequences(segment) * segment.tokens + sum(map(tokens_alone, segment.children))


def draw(path: Path) -> None:
    """One panel for each trie: what several sequences read is orange, and is computed once."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 2.7), layout="constrained")
    for axes, (title, trie) in zip(panels, TRIES, strict=True):
        axes.set_title(title, fontsize=11, weight="bold", loc="left")
        _draw(axes, trie, 0.0, 0)
        all_tokens, different = tokens_alone(trie), different_tokens(trie)
        note = f"{all_tokens} tokens, {different} different ones: {all_tokens / different:.1f} to one"
        axes.text(0, -3.9, note, fontsize=9)
        axes.set(xlim=(-0.2, 17), ylim=(-4.1, HEIGHT + 0.1))
        axes.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axes: plt.Axes, segment: Segment, x: float, line: int) -> None:
    """At ``x`` on a line of its own, and what goes on behind it, the first on the same line."""
    color = SHARED if sequences(segment) > 1 else OWN
    y, end = -float(line), x + segment.tokens
    axes.add_patch(plt.Rectangle((x, y), segment.tokens, HEIGHT, facecolor=color, edgecolor="white"))
    axes.text(x + segment.tokens / 2, y + HEIGHT / 2, segment.name, ha="center", va="center", fontsize=9, color="white")
    for child in segment.children:
        middle = -line + HEIGHT / 2
        bend = ([end, end + GAP / 2, end + GAP / 2, end + GAP], [y + HEIGHT / 2, y + HEIGHT / 2, middle, middle])
        axes.plot(*bend, color="0.4", linewidth=1.2)
        _draw(axes, child, end + GAP, line)
        line += lines(child)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[2] / "docs" / "images" / "tries.png"
    parser.add_argument("--output", type=Path, default=default)
    draw(parser.parse_args().output)
