"""Draw the speed-up of agents' batches that ``bench_actor.py`` measured against the number of turns, below its bound.

    python scripts/plot_turns.py docs/data/actor_4b_agents.csv --out docs/images

Takes any number of CSV files and of their cases ``agent:...``, which differ in their turns alone to make a curve.
Writes speedup_against_turns as PNG and SVG, drawn as by ``plot_bench.py``. What others have published stands below as
text: other models, data and machines, no curves of ours.
"""

import argparse
import sys
from pathlib import Path

from plot_bench import draw, read_points
from rich.console import Console

AGENT = "agent:"
PEERS = (
    ("AReaL-DTA", "up to 8.31x over dense training, 1.70x over a sparse tree mask", "tau2-bench, PMLR 306, zhang26hr"),
    ("Tree Training", "6.2x", "update of agents' trajectories, arXiv:2511.00413v3"),
    ("prime-rl", "3.75x", "fine-tuning on trees, PrimeIntellect-ai/prime-rl pull request 2405"),
)
"""Who has published which speed-up, and where."""


def note_on_peers() -> str:
    """A line for each."""
    lines = [f"{name}: {speedup} ({source})" for name, speedup, source in PEERS]
    return "\n".join(["Published by others, on other models, data and machines:", *lines])


def turns_of(case: str) -> int:
    """The rows of a session."""
    return int(case.split(",")[3])


def curve_of(case: str) -> str:
    """All but the turns and the prompts of a rank."""
    prompt, reply, tool, _turns, n, _groups = case.removeprefix(AGENT).split(",")
    return f"P={prompt} reply={reply} tool={tool} n={n}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    points = [point for point in read_points(args.csv) if point.case.startswith(AGENT)]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "speedup_against_turns"
    for file in draw(points, turns_of, "turns of a session", curve_of, path, note_on_peers()):
        Console().print(str(file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
