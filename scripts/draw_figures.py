"""Draw the images of the pages, from the tables in docs/data, the planner, the layout and what the program writes.

    python scripts/draw_figures.py [NAME ...]        # into docs/images; names are those of the files

Each is 7 inches wide with letters of 12 points, so that a phone shows it, and on white for both colour schemes.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from benchmarks.shapes import config_of
from matplotlib.colors import ListedColormap, LogNorm
from rich.console import Console
from rich.text import Text

from verl_pg_plugin.architectures import text_skeleton
from verl_pg_plugin.layout import build_packed_layout
from verl_pg_plugin.planning.activation_level import Levels
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.planning.forecast import batch_of_lengths, forecast
from verl_pg_plugin.planning.memory import TokenBytes, WeightBytes

DATA = Path(__file__).parents[1] / "docs" / "data"
IMAGES = DATA.with_name("images")
WIDTH, ABOUT = 7.0, "Qwen3-4B config, verl 0.9.1"
STOCK, OURS, HOST = "#8c8c8c", "#f58518", "#fbd3a8"
RESPONSE_COLORS = ("#4c78a8", "#54a24b", "#b279a2")


def rows_of(name: str, **wanted: str) -> list[dict[str, str]]:
    """Rows of a table in docs/data whose columns hold what is wanted; commits by their beginning."""
    with (DATA / f"{name}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key].startswith(text) for key, text in wanted.items())]


def new_axes(height: float, panels: int = 1) -> tuple[plt.Figure, list[plt.Axes]]:
    figure, axes = plt.subplots(panels, 1, figsize=(WIDTH, height), layout="constrained", squeeze=False)
    return figure, list(axes[:, 0])


def update_panels(
    height: float, cases: dict[str, dict[str, str]], paths: Sequence[str]
) -> list[tuple[plt.Axes, list[dict[str, str]]]]:
    """A panel for each title, with the updates of its case by each path."""
    _, panels = new_axes(height, len(cases))
    found = []
    for axes, (title, case) in zip(panels, cases.items(), strict=True):
        axes.set_title(title, loc="left", weight="bold", pad=12)
        rows = {row["path"]: row for row in rows_of("updates", phase="update", **case)}
        found.append((axes, [rows[path] for path in paths]))
    return found


def bars(axes: plt.Axes, names: list[str], values: list[float], notes: list[str], colors: list[str]) -> None:
    """Lying bars, each with its name above it and its note behind it."""
    for at, (name, value, note, color) in enumerate(zip(names, values, notes, colors, strict=True)):
        axes.barh(at, value, 0.5, color=color)
        axes.text(0, at - 0.3, name, va="bottom")
        axes.text(value, at, f" {note}", va="center")
    axes.set_ylim(len(names) - 0.6, -0.8)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def does_it_pay() -> plt.Figure:
    """Forecast of an update by sharing alone: prompt by n, a panel for each length of responses."""
    prompts, counts = (128, 512, 2048, 8192, 32768), (32, 16, 8, 4, 1)
    marks = {
        300: [("GSM8K", 0, 2)],
        1024: [("documents", 3, 2)],
        4096: [("DAPO", 0, 1), ("agents", 2, 1)],
    }
    config = config_of("qwen3-4b")
    module = text_skeleton(config)
    room = WeightBytes.of(module, 8).room(80 * 2**30, 100 * 2**30)
    flops, levels = ModelFlops.of(module), Levels(None, TokenBytes.of(config, compiled=False), room)
    figure, panels = new_axes(11.5, len(marks))
    for axes, (response, cases) in zip(panels, marks.items(), strict=True):
        speedups = np.empty((len(counts), len(prompts)))
        for y, n in enumerate(counts):
            for x, prompt in enumerate(prompts):
                batch = batch_of_lengths([prompt] * 2, [[response] * n] * 2)
                budget = max(20480, prompt + response)
                speedups[y, x] = forecast(batch, flops, levels, budget, compile_layers=False).update
        axes.imshow(speedups, cmap="YlOrRd", norm=LogNorm(1, 12), aspect="auto")
        labels = {(x, y): f"\n{name}" for name, x, y in cases}
        for (y, x), speedup in np.ndenumerate(speedups):
            color = "white" if speedup > 5 else "black"
            text = f"{speedup:.1f}x{labels.get((x, y), '')}"
            axes.text(x, y, text, ha="center", va="center", color=color, weight="bold" if (x, y) in labels else None)
        axes.set_xticks(range(len(prompts)), [f"{prompt:,}" for prompt in prompts])
        axes.set_yticks(range(len(counts)), [str(n) for n in counts])
        axes.tick_params(length=0)
        axes.set_title(f"responses of {response:,} tokens", loc="left", weight="bold")
        axes.set_ylabel("responses per prompt, n")
    panels[-1].set_xlabel(f"tokens of a prompt; {ABOUT}")
    return figure


def steps() -> plt.Figure:
    """Seconds of a whole step by phase, stock verl and packed mode."""
    phases = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
    runs: dict[str, dict[str, float]] = {}
    for row in rows_of("steps", case="4096,1024,4,8"):
        runs.setdefault(row["mode"], {})[row["phase"]] = float(row["seconds_median"])
    stock, packed = (runs[mode]["step"] for mode in ("rmpad", "packed"))
    figure, (axes,) = new_axes(3)
    notes = [f"{stock:.1f} s", f"{packed:.1f} s, {stock / packed:.2f}x"]
    bars(axes, ["stock verl", "packed"], [stock, packed], notes, ["#d0d0d0"] * 2)
    for at, mode in enumerate(("rmpad", "packed")):
        left = 0.0
        for name, color in zip(phases, plt.get_cmap("tab10").colors, strict=False):
            axes.barh(at, runs[mode][name], 0.5, left, color=color, label=None if at else name)
            left += runs[mode][name]
    axes.set_xlim(0, 1.1 * stock)
    axes.set_xlabel(f"seconds of a step, prompt 4096, response 1024, n 4\n{ABOUT}, one H200, fsdp2")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def where_it_comes_from() -> plt.Figure:
    """What is left of stock verl's update after each part, with a shared prompt and with nothing shared."""
    parts = {
        "stock verl": "rmpad",
        "prefixes shared, head on responses": "packed:compile_layers=False,activations=inputs",
        "attention's outputs kept": "packed:compile_layers=False",
        "layers compiled": "packed",
        "flash-attn 4": "packed:attention_kernel=flash_attn_4",
    }
    cases = {
        "prompt 8192, response 1024, n 8": {"case": "8192,1024,8,1", "run": "waterfall"},
        "nothing shared: 4096, 1024, n 1": {"case": "4096,1024,1,4", "run": "waterfall"},
    }
    for axes, rows in update_panels(7.4, cases, list(parts.values())):
        seconds = [float(row["seconds_median"]) for row in rows]
        notes = [f"{seconds[0]:.2f} s", *(f"{value:.2f} s, {seconds[0] / value:.2f}x" for value in seconds[1:])]
        bars(axes, list(parts), seconds, notes, [STOCK, *[OURS] * 4])
        for at, (before, after) in enumerate(pairwise(seconds), start=1):
            axes.barh(at, before - after, 0.5, after, color="none", edgecolor=STOCK, linestyle=":")
            axes.texts[2 * at + 1].set_x(before)
        axes.texts[-3].set_weight("bold")
        axes.set_xlim(0, 1.3 * seconds[0])
    axes.set_xlabel(f"seconds of an update: {ABOUT}, one H200")
    return axes.figure


def reward_over_time() -> plt.Figure:
    """Rewards of three seeds by the seconds that their steps took, the first one left out, which starts processes."""
    figure, (axes,) = new_axes(4.2)
    for mode, color in (("rmpad", STOCK), ("packed", OURS)):
        for seed in "123":
            steps = rows_of("learning_cpu", mode=mode, seed=seed)[1:]
            seconds = np.cumsum([float(step["step_s"]) for step in steps])
            rewards = np.convolve([float(step["reward"]) for step in steps], np.full(5, 0.2), "valid")
            label = "stock verl" if mode == "rmpad" else mode
            axes.plot(seconds[4:], rewards, color=color, linewidth=2, label=label if seed == "1" else None)
    axes.set_xlabel("seconds of training: tiny Qwen3, two CPU cores, 40 steps, verl 0.9.1")
    axes.set_ylabel("reward, mean of 5 steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def memory() -> plt.Figure:
    """Peak of an update on the GPU, and what waits on the host."""
    cases = {
        "4B, prompt 8192, response 1024, n 8": {"run": "waterfall", "case": "8192,1024,8"},
        "4B, prompt 32768, response 1024, n 8": {"run": "long prompts"},
        "8B, prompt 16384, response 4096, n 16": {"run": "8B, 16384"},
    }
    for axes, rows in update_panels(6, cases, ("rmpad", "packed")):
        peaks, hosts = ([float(row[key]) for row in rows] for key in ("peak_gib", "host_gib"))
        notes = [f"{peak:.1f} GiB, {float(row['seconds_median']):.1f} s" for peak, row in zip(peaks, rows, strict=True)]
        bars(axes, ["stock verl", "packed"], peaks, notes, [STOCK, OURS])
        axes.barh(1, hosts[1], 0.5, peaks[1], color=HOST, hatch="//", edgecolor="white")
        axes.texts[-1].set_x(sum(peaks[1:] + hosts))
        axes.set_xlim(0, 130)
    axes.set_xlabel("GiB at the peak of an update, hatched on the host:\nQwen3 configs, verl 0.9.1, one H200")
    return axes.figure


def packed_tokens() -> plt.Figure:
    """Three responses to a prompt as stock verl computes them and as packed tokens, and which tokens read which."""
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
    """From the layout itself, so that the image is what the engine does."""
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
    """What sequences share, as a tree each: a group, prompts that begin alike, an agent's sessions turn by turn."""
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


Pieces = Sequence[tuple[str, int]]


def beginnings(sequences: Sequence[Pieces]) -> dict[tuple[tuple[str, int], ...], int]:
    """Nodes of the tree, each by the pieces from the root to it, and how many sequences go through it."""
    return Counter(tuple(pieces[: at + 1]) for pieces in sequences for at in range(len(pieces)))


def draw_tree(axes: plt.Axes, y: float, sequences: Sequence[Pieces]) -> float:
    """A node is a box behind its parent's, in its parent's line if it is the first child. The y below the last line."""
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
    """The chunks of a group in a forward, which hands on keys and values, and in an update, which hands back sums."""
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


def learning_cpu() -> plt.Figure:
    """Every run's metrics by step, a colour for each seed, on the band of the rmpad runs."""
    return learning("learning_cpu")


def learning_gpu() -> plt.Figure:
    """The same with vLLM."""
    return learning("learning_gpu")


def learning(name: str) -> plt.Figure:
    titles = {"reward": "reward", "kl": "KL loss to the reference", "entropy": "entropy", "grad_norm": "gradient norm"}
    seeds = sorted({row["seed"] for row in rows_of(name)})
    figure, panels = new_axes(10, len(titles))
    for axes, (metric, title) in zip(panels, titles.items(), strict=True):
        runs = {
            (mode, seed): [float(row[metric]) for row in rows_of(name, mode=mode, seed=seed)]
            for mode in ("rmpad", "packed")
            for seed in seeds
        }
        stock = list(zip(*(line for (mode, _), line in runs.items() if mode == "rmpad"), strict=True))
        axes.fill_between(range(1, len(stock) + 1), list(map(min, stock)), list(map(max, stock)), color="0.9")
        for (mode, seed), line in runs.items():
            style = {"linewidth": 3, "alpha": 0.35} if mode == "rmpad" else {"linewidth": 1.5, "linestyle": "--"}
            label = f"{mode}, seed {seed}" if axes is panels[0] else None
            axes.plot(range(1, len(line) + 1), line, color=f"C{seed}", label=label, **style)
        axes.set_title(title, loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("training step; grey: from the lowest to the highest rmpad run")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def problems() -> str:
    """What a run with four mistakes writes before it starts anything, as SVG."""
    overrides = [
        "actor_rollout_ref.actor.use_prefix_grouper=True",
        "prefix_grouper.verify=sometimes",
        "actor_rollout_ref.model.mtp.enable=True",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=9",
        "trainer.n_gpus_per_node=8",
        "data.train_files=gsm8k/train.parquet",
    ]
    hidden = ["+machine=cpu", "algorithm.adv_estimator=grpo", "data.val_files=[]", "actor_rollout_ref.model.path=model"]
    with TemporaryDirectory() as folder:
        config_of("tiny", architectures=["Qwen3ForCausalLM"]).save_pretrained(Path(folder, "model"))
        command = [sys.executable, "-W", "ignore", "-m", "verl_pg_plugin.main_ppo", *overrides, *hidden]
        environment = {**os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": str(IMAGES.parents[1])}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    written = done.stderr[done.stderr.index(" in the configuration, nothing was started") - 10 :]
    command = " \\\n    ".join(["$ python -m verl_pg_plugin.main_ppo", *overrides])
    return terminal("before Ray starts", command, written.strip())


def a_run() -> str:
    """What a run tells of sharing, as SVG: docs/data/run.txt has the lines of the whole steps at 8192, 1024, 8."""
    return terminal("Qwen3-4B config, one H200", "$ bash examples/run_qwen3_pg.sh", (DATA / "run.txt").read_text())


def terminal(title: str, command: str, written: str) -> str:
    columns = 64
    lines = [textwrap.fill(line, columns, subsequent_indent=" " * 8) for line in written.splitlines()]
    console = Console(record=True, width=columns, file=io.StringIO())
    console.print(Text(command, style="bold"))
    console.print(Text("\n".join([*lines, ""])))
    svg = console.export_svg(title=title)
    # Letters of the reader's machine: an image loads nothing from another host.
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")


FIGURES: dict[str, Callable[[], plt.Figure | str]] = {
    function.__name__: function
    for function in (
        *(does_it_pay, steps, where_it_comes_from, reward_over_time, memory),
        *(packed_tokens, prefix_trees, split_group, learning_cpu, learning_gpu, problems, a_run),
    )
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}; all by default")
    plt.rcParams.update({"font.size": 12, "figure.facecolor": "white"})
    for name in parser.parse_args().names or FIGURES:
        figure = FIGURES[name]()
        if isinstance(figure, str):
            (IMAGES / f"{name}.svg").write_text(figure)
        else:
            figure.savefig(IMAGES / f"{name}.png", dpi=110, bbox_inches="tight", pad_inches=0.1)
