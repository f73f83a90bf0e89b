#!/usr/bin/env python
"""The picture of the package in docs/design.md, made from its imports.

    python scripts/upkeep/draw_rooms.py            # writes docs/images/rooms.png, and its arrows to docs/data/rooms.csv
    python scripts/upkeep/draw_rooms.py --check    # fails if an arrow came or went since

A box is a room: a package, or a module that stands beside them. Whatever a room imports, directly or not, lies
below it; rooms that import each other lie side by side, with red arrows. An arrow that others imply (a -> b -> c makes
a -> c) is in the list and not in the picture.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.imports import Graph, import_graph, module_files, reachable  # noqa: E402

PACKAGE = REPOSITORY / "verl_pg_plugin"
PICTURE = REPOSITORY / "docs/images/rooms.png"
ARROWS = REPOSITORY / "docs/data/rooms.csv"
BOX_WIDTH, BOX_HEIGHT = 1.5, 0.62
STEP_X, STEP_Y = 1.9, 1.35
PASSING = 0.5

Point = tuple[float, float]
Arrow = tuple[str, str]


def room_of(module: str) -> str:
    """``engine`` for ``verl_pg_plugin.engine.batch.sequences``; the package's own file is a room like others."""
    return module.split(".")[1] if "." in module else "__init__"


def rooms(package: Path) -> Graph:
    """Rooms, each with those it imports."""
    modules = import_graph(package)
    graph: dict[str, set[str]] = {room_of(module): set() for module in modules}
    for module, imported in modules.items():
        graph[room_of(module)] |= {room_of(name) for name in imported if name in modules} - {room_of(module)}
    return {room: frozenset(imported) for room, imported in sorted(graph.items())}


def lines_of(package: Path) -> dict[str, int]:
    """Lines of code and comments in each room."""
    lines: dict[str, int] = defaultdict(int)
    for module, file in module_files(package).items():
        lines[room_of(module)] += len(file.read_text().splitlines())
    return lines


def rings(graph: Graph) -> dict[str, frozenset[str]]:
    """Each room with those that it imports and that import it, all of them one ring; of one room as a rule."""
    below = {room: reachable(graph, room) for room in graph}
    return {room: frozenset({room, *(other for other in below[room] if room in below[other])}) for room in graph}


def heights(graph: Graph) -> dict[str, int]:
    """Layer of each room: one above the highest that it imports; those of a ring lie side by side."""
    ring = rings(graph)
    found: dict[frozenset[str], int] = {}

    def height(room: str) -> int:
        if ring[room] not in found:
            outside = {other for member in ring[room] for other in graph[member]} - ring[room]
            found[ring[room]] = max((height(other) + 1 for other in outside), default=0)
        return found[ring[room]]

    return {room: height(room) for room in graph}


def arrows_to_draw(graph: Graph) -> list[Arrow]:
    """Arrows that no detour implies, and all within a ring."""
    ring = rings(graph)

    def implied(room: str, target: str) -> bool:
        between = {other for member in ring[room] for other in graph[member]} - ring[room] - ring[target]
        return ring[room] != ring[target] and any(target in reachable(graph, other) for other in between)

    return [(room, target) for room in graph for target in sorted(graph[room]) if not implied(room, target)]


@dataclass(frozen=True)
class Drawing:
    """Middles of boxes, and for every arrow the points where it passes the layers between its ends."""

    boxes: dict[str, Point]
    arrows: dict[Arrow, list[Point]]

    @classmethod
    def of(cls, graph: Graph) -> Drawing:
        """Layers from the bottom; in a layer each box, and each arrow that passes, near what it is tied to."""
        height = heights(graph)
        links: dict[object, set[object]] = defaultdict(set)
        layers: dict[int, list[object]] = defaultdict(list)
        for room in graph:
            layers[height[room]].append(room)
        chains: dict[Arrow, list[object]] = {}
        for arrow in arrows_to_draw(graph):
            passed = [(arrow, layer) for layer in range(height[arrow[0]] - 1, height[arrow[1]], -1)]
            chains[arrow] = [arrow[0], *passed, arrow[1]]
            for point in passed:
                layers[point[1]].append(point)
            for here, there in pairwise(chains[arrow]):
                links[here].add(there)
                links[there].add(here)
        level = {item: layer for layer, items in layers.items() for item in items}
        x: dict[object, float] = {}
        for items in layers.values():
            x |= _side_by_side(items)
        for sweep in range(40):
            down = sweep % 2 == 0
            for layer in sorted(layers, reverse=down):
                side = {item: [x[o] for o in links[item] if (level[o] > layer) == down] for item in layers[layer]}
                layers[layer].sort(key=lambda item, side=side: fmean(side[item] or [x[item]]))  # type: ignore[misc]
                x |= _side_by_side(layers[layer])
        return cls(
            {room: (x[room], height[room] * STEP_Y) for room in graph},
            {arrow: [(x[point], level[point] * STEP_Y) for point in chain[1:-1]] for arrow, chain in chains.items()},
        )


def _side_by_side(items: list[object]) -> dict[object, float]:
    """x of the middle of each item of a layer: boxes are wide, arrows that pass are narrow."""
    widths = [STEP_X if isinstance(item, str) else PASSING for item in items]
    right = list(accumulate(widths))
    return {item: end - width / 2 - right[-1] / 2 for item, end, width in zip(items, right, widths, strict=True)}


def draw(graph: Graph, lines: dict[str, int], picture: Path) -> None:
    """Write the picture."""
    drawing = Drawing.of(graph)
    xs, ys = zip(*drawing.boxes.values(), strict=True)
    matplotlib.rcParams.update({"svg.hashsalt": "rooms", "font.size": 10})
    figure, axes = plt.subplots(figsize=(max(xs) - min(xs) + STEP_X, max(ys) - min(ys) + STEP_Y))
    axes.set(xlim=(min(xs) - STEP_X / 2, max(xs) + STEP_X / 2), ylim=(min(ys) - 0.6, max(ys) + 0.6))
    axes.axis("off")
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
    for (room, target), passed in drawing.arrows.items():
        _draw_arrow(axes, drawing.boxes[room], passed, drawing.boxes[target])
    for room, (x, y) in drawing.boxes.items():
        corner = (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2)
        shape = FancyBboxPatch(corner, BOX_WIDTH, BOX_HEIGHT, "round,pad=0,rounding_size=0.08", zorder=2)
        shape.set(facecolor="#eaf0f8", edgecolor="#3b5b85")
        axes.add_patch(shape)
        name = f"{room}/" if (PACKAGE / room).is_dir() else f"{room}.py"
        axes.text(x, y + 0.1, name, ha="center", va="center", weight="bold", zorder=3)
        axes.text(x, y - 0.15, f"{lines[room]:,} lines", ha="center", va="center", size=8, color="0.3", zorder=3)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150, facecolor="white")
    plt.close(figure)


def _draw_arrow(axes: Axes, start: Point, passed: list[Point], end: Point) -> None:
    """From the lower edge of a box to the upper edge of another; in red and from side to side within a ring."""
    style = {"arrowstyle": "-|>", "color": "0.45", "shrinkA": 0, "shrinkB": 1, "lw": 1.1, "mutation_scale": 11}
    if start[1] == end[1]:
        style |= {"color": "#b03030", "connectionstyle": "arc3,rad=-0.35"}
        lift = BOX_HEIGHT / 2 if start[0] < end[0] else -BOX_HEIGHT / 2
        axes.annotate("", (end[0], end[1] + lift), (start[0], start[1] + lift), arrowprops=style, zorder=4)
        return

    def towards(box: Point, other: Point, edge: float) -> Point:
        return box[0] + max(-0.35, min(0.35, (other[0] - box[0]) * 0.2)), box[1] + edge * BOX_HEIGHT / 2

    way = [start, *passed, end]
    points = [towards(start, way[1], -1)]
    for x, y in passed:
        points += [(x, y + BOX_HEIGHT / 2), (x, y - BOX_HEIGHT / 2)]
    points.append(towards(end, way[-2], 1))
    axes.plot(*zip(*points[:-1], strict=True), color=style["color"], lw=style["lw"], zorder=1)
    axes.annotate("", points[-1], points[-2], arrowprops=style, zorder=1)


def as_csv(graph: Graph) -> str:
    """Every arrow, also those that others imply."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("room", "imports"))
    writer.writerows((room, target) for room, targets in graph.items() for target in sorted(targets))
    return text.getvalue()


def main() -> int:
    """Exit code: 1 if the picture is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if an arrow came or went")
    parser.add_argument("--picture", type=Path, default=PICTURE, help=".svg or .png")
    arguments = parser.parse_args()
    graph = rooms(PACKAGE)
    if arguments.check:
        before = set(ARROWS.read_text().splitlines()) if ARROWS.exists() else set()
        if changed := sorted(before ^ set(as_csv(graph).splitlines())):
            sys.stderr.write(f"error: the picture of the rooms is stale: {'; '.join(changed)}\n")
            sys.stderr.write(f"renew it: python {Path(__file__).relative_to(REPOSITORY)}\n")
            return 1
        return 0
    draw(graph, lines_of(PACKAGE), arguments.picture)
    ARROWS.write_text(as_csv(graph))
    return 0


if __name__ == "__main__":
    sys.exit(main())
