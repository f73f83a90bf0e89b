"""Draw the images of the pages, from tables in docs/data, the layout and the program's output.

    python scripts/draw_figures.py [NAME ...]        # into docs/images, by file name

Images of concepts are in ``figures/concepts.py``.
"""

import argparse
import csv
import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np
from benchmarks.shapes import config_of
from figures.concepts import packed_tokens, prefix_trees, split_group
from figures.style import HOST, OURS, STOCK, new_axes
from rich.console import Console
from rich.text import Text

DATA = Path(__file__).parents[1] / "docs" / "data"
IMAGES = DATA.with_name("images")
RUNS = "verl 0.9.1, November 2026"
ABOUT = f"Qwen3-4B config, {RUNS}"


def rows_of(name: str, **wanted: str) -> list[dict[str, str]]:
    """Return the rows of a table in docs/data whose columns start with the ``wanted`` texts."""
    with (DATA / f"{name}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key].startswith(text) for key, text in wanted.items())]


def update_panels(
    height: float, cases: dict[str, dict[str, str]], paths: Sequence[str]
) -> list[tuple[plt.Axes, list[dict[str, str]]]]:
    """Return a panel for each title, with the updates of its case by each path."""
    _, panels = new_axes(height, len(cases))
    rows_by_panel = []
    for axes, (title, case) in zip(panels, cases.items(), strict=True):
        axes.set_title(title, loc="left", weight="bold", pad=12)
        rows = {row["path"]: row for row in rows_of("updates", phase="update", **case)}
        rows_by_panel.append((axes, [rows[path] for path in paths]))
    return rows_by_panel


def bars(axes: plt.Axes, names: list[str], values: list[float], notes: list[str], colors: list[str]) -> None:
    """Draw horizontal bars, each with its name above and its note to the right."""
    for at, (name, value, note, color) in enumerate(zip(names, values, notes, colors, strict=True)):
        axes.barh(at, value, 0.5, color=color)
        axes.text(0, at - 0.3, name, va="bottom")
        axes.text(value, at, f" {note}", va="center")
    axes.set_ylim(len(names) - 0.6, -0.8)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


PHASES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")


def steps_by_phase(height: float, cases: dict[str, dict[str, str]], label: str, table: str = "steps") -> plt.Figure:
    """Draw the seconds of whole steps by phase, stock verl and packed mode, for each title and case.

    Of several runs, the last in the table counts.
    """
    figure, (axes,) = new_axes(height)
    runs, names, totals, notes = [], [], [], []
    for title, case in cases.items():
        both = [
            {row["phase"]: float(row["seconds_median"]) for row in rows_of(table, **case) if row["mode"] == mode}
            for mode in ("rmpad", "packed")
        ]
        stock, packed = (run["step"] for run in both)
        runs += both
        names += [f"{title}stock verl", "packed"]
        totals += [stock, packed]
        notes += [f"{stock:.1f} s", f"{packed:.1f} s, {stock / packed:.2f}x"]
    bars(axes, names, totals, notes, ["#d0d0d0"] * len(totals))
    for at, run in enumerate(runs):
        left = 0.0
        for name, color in zip(PHASES, plt.get_cmap("tab10").colors, strict=False):
            axes.barh(at, run.get(name, 0.0), 0.5, left, color=color, label=None if at else name)
            left += run.get(name, 0.0)
    axes.set_xlim(0, 1.2 * max(totals))
    axes.set_xlabel(label)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def steps() -> plt.Figure:
    """Draw the seconds of a whole step by phase on one GPU."""
    label = f"seconds of a step, 4 prompts of 8192, response 1024, n 8\n{ABOUT}, one H200, fsdp2"
    return steps_by_phase(3, {"": {"model": "qwen3-4b", "case": "8192,1024,8,4", "num_gpus": "1"}}, label)


def demo() -> plt.Figure:
    """Draw the seconds of a step of ``python -m verl_pg_plugin demo`` by phase."""
    label = f"seconds of a step: 8 prompts of 512 tokens, n 8\ntiny Qwen3, {RUNS}, two CPU cores"
    return steps_by_phase(3, {"": {}}, label, "demo")


def several_gpus() -> plt.Figure:
    """Draw the seconds of a whole step by phase on two and four GPUs."""
    cases = {
        "4B, two GPUs, 8 prompts each: ": {"model": "qwen3-4b", "num_gpus": "2", "commit": "7e4c9ff"},
        "4B, four GPUs, 4 prompts each: ": {"model": "qwen3-4b", "num_gpus": "4"},
        "8B, two GPUs, 8 prompts each: ": {"model": "qwen3-8b", "num_gpus": "2", "commit": "f1364f6"},
        "8B, four GPUs, 2 prompts each: ": {"model": "qwen3-8b", "num_gpus": "4"},
        "30B-A3B, four GPUs, 2 prompts each: ": {"model": "qwen3-30b-a3b", "num_gpus": "4"},
    }
    label = f"seconds of a step, prompt 8192, response 1024, n 8\nQwen3 configs, {RUNS}, H200s of one host"
    label += "\nonly the cases of two GPUs have shared generation\nand old log-probs from the update"
    return steps_by_phase(9, cases, label)


def models() -> plt.Figure:
    """Draw an update's speed-up by model, with a mark for the FLOP ratio."""
    cases = {
        "Qwen3-0.6B": {"run": "0.6B", "case": "8192"},
        "Qwen3-4B": {"run": "waterfall", "case": "8192"},
        "Qwen3-4B, LoRA, response 256": {"run": "LoRA"},
        "Qwen3-8B": {"run": "8B", "case": "8192,1024"},
        "Qwen3-30B-A3B, 12 layers": {"run": "30B-A3B"},
        "Qwen3.5-9B, a hybrid, not compiled": {"model": "qwen3.5-9b", "case": "8192", "commit": "a58d7bc"},
        "Qwen3-VL-8B, 512 tokens and 4 images": {"run": "VL 8B"},
    }
    rows = [
        next(row for row in rows_of("updates", phase="update", **case) if row["path"] == "packed")
        for case in cases.values()
    ]
    gains, flops = ([float(row[key]) for row in rows] for key in ("speedup", "flop_bound"))
    figure, (axes,) = new_axes(6)
    bars(axes, list(cases), gains, [f"{gain:.2f}x" for gain in gains], [OURS] * len(gains))
    axes.plot(flops, range(len(flops)), "|", color="black", markersize=20, markeredgewidth=2, label="FLOP ratio")
    axes.set_xlim(0, 1.15 * max(gains))
    axes.set_xlabel(
        f"update, packed over stock verl: prompt 8192, response 1024, n 8\nif not noted; {RUNS}, one H200, fsdp2"
    )
    figure.legend(loc="outside lower center", frameon=False)
    return figure


def where_it_comes_from() -> plt.Figure:
    """Draw an update's seconds as each part is enabled, with a shared prompt and without."""
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
    axes.set_xlabel(f"seconds of an update\n{ABOUT}, one H200")
    return axes.figure


MODES = {"rmpad": ("stock verl", STOCK), "packed": ("packed", OURS)}


def runs_of(name: str, mode: str, metric: str) -> np.ndarray:
    """Return a metric (seeds, steps) of the three runs of a mode."""
    return np.array([[float(row[metric]) for row in rows_of(name, mode=mode, seed=seed)] for seed in "123"])


def reward_over_time() -> plt.Figure:
    """Draw the rewards of three seeds by seconds of training, without the first step, which starts processes."""
    figure, (axes,) = new_axes(4.2)
    for mode, (label, color) in MODES.items():
        seconds = np.cumsum(runs_of("learning_cpu", mode, "step_s")[:, 1:], axis=1)
        for seed, rewards in enumerate(runs_of("learning_cpu", mode, "reward")[:, 1:]):
            means = np.convolve(rewards, np.full(5, 0.2), "valid")
            axes.plot(seconds[seed, 4:], means, color=color, linewidth=2, label=None if seed else label)
    axes.set_xlabel(f"seconds of training: tiny Qwen3, two CPU cores, {RUNS}")
    axes.set_ylabel("reward, mean of 5 steps")
    axes.legend(frameon=False)
    return figure


def memory() -> plt.Figure:
    """Draw an update's peak memory on the GPU and on the host."""
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
    axes.set_xlabel(f"GiB at the peak of an update, hatched on the host\nQwen3 configs, {RUNS}, one H200")
    return axes.figure


def learning_cpu() -> plt.Figure:
    """Every run's metrics by step, a colour for each seed, on the band of the rmpad runs."""
    titles = {"reward": "reward", "kl": "KL loss to the reference", "entropy": "entropy", "grad_norm": "gradient norm"}
    styles = {"rmpad": {"linewidth": 3, "alpha": 0.35}, "packed": {"linewidth": 1.5, "linestyle": "--"}}
    figure, panels = new_axes(10, len(titles))
    for axes, (metric, title) in zip(panels, titles.items(), strict=True):
        stock = runs_of("learning_cpu", "rmpad", metric)
        steps = range(1, stock.shape[1] + 1)
        axes.fill_between(steps, stock.min(0), stock.max(0), color="0.9")
        for mode, style in styles.items():
            for seed, line in enumerate(runs_of("learning_cpu", mode, metric), start=1):
                label = f"{mode}, seed {seed}" if axes is panels[0] else None
                axes.plot(steps, line, color=f"C{seed}", label=label, **style)
        axes.set_title(title, loc="left", weight="bold")
    panels[-1].set_xlabel("training step; grey: from the lowest to the highest rmpad run")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def learning_gpu() -> plt.Figure:
    """Draw rewards and KL by step with vLLM: each mode's mean and range over seeds."""
    figure, panels = new_axes(5.5, 2)
    titles = {"reward": "reward", "kl": "KL loss to the reference"}
    for axes, (metric, title) in zip(panels, titles.items(), strict=True):
        for mode, (label, color) in MODES.items():
            runs = runs_of("learning_gpu", mode, metric)
            steps = range(1, runs.shape[1] + 1)
            axes.fill_between(steps, runs.min(0), runs.max(0), color=color, alpha=0.3, linewidth=0)
            axes.plot(steps, runs.mean(0), color=color, linewidth=2, label=label)
        axes.set_title(title, loc="left", weight="bold")
    panels[0].legend(frameon=False)
    panels[-1].set_xlabel(f"training step: tiny Qwen3, one H200, vLLM, {RUNS}")
    return figure


def problems() -> str:
    """Return the problems of a run with four mistakes, as SVG."""
    overrides = [
        "actor_rollout_ref.actor.use_prefix_grouper=True",
        "++prefix_grouper.verify=sometimes",
        "++prefix_grouper.activatons=inputs",
        "actor_rollout_ref.model.use_fused_kernels=True",
        "actor_rollout_ref.actor.calculate_sum_pi_squared=True",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=3",
        "trainer.n_gpus_per_node=8",
    ]
    hidden = ["+machine=cpu", "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=model"]
    with TemporaryDirectory() as folder:
        config_of("tiny", architectures=["Qwen3ForCausalLM"]).save_pretrained(Path(folder, "model"))
        command = [sys.executable, "-W", "ignore", "-m", "verl_pg_plugin.main_ppo", *overrides, *hidden]
        environment = {**os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": str(IMAGES.parents[1])}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    written = done.stderr[done.stderr.index(" in the configuration, nothing was started") - 10 :]
    command = " \\\n    ".join(["$ python -m verl_pg_plugin.main_ppo", *overrides])
    return terminal("before Ray starts", command, written.strip())


def a_run() -> str:
    """Return the log lines in docs/data/run.txt as SVG: whole steps at 8192, 1024, 8."""
    return terminal(
        "Qwen3-4B config, one H200, verl 0.9.1, 26 November 2026",
        "$ MODEL_PATH=... bash examples/run_qwen3_pg.sh",
        (DATA / "run.txt").read_text(),
    )


def terminal(title: str, command: str, written: str) -> str:
    columns = 64
    lines = [textwrap.fill(line, columns, subsequent_indent=" " * 8) for line in written.splitlines()]
    console = Console(record=True, width=columns, file=io.StringIO())
    console.print(Text(command, style="bold"))
    console.print(Text("\n".join([*lines, ""])))
    svg = console.export_svg(title=title)
    # Use the reader's fonts: an image must not load from another host.
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")


FIGURES: dict[str, Callable[[], plt.Figure | str]] = {
    function.__name__: function
    for function in (
        *(steps, demo, several_gpus, models, where_it_comes_from, reward_over_time, memory),
        *(packed_tokens, prefix_trees, split_group, learning_cpu, learning_gpu, problems, a_run),
    )
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}; all by default")
    for name in parser.parse_args().names or FIGURES:
        figure = FIGURES[name]()
        if isinstance(figure, str):
            (IMAGES / f"{name}.svg").write_text(figure)
        else:
            figure.savefig(IMAGES / f"{name}.png", dpi=160, bbox_inches="tight", pad_inches=0.1)
