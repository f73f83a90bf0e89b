"""What compiled layers cost: seconds of the first step, graphs over ragged steps, and what processes and ranks share.

    python scripts/bench_compile.py --layers 2 --csv outputs/bench_compile.csv           # a rehearsal on the CPU
    python scripts/bench_compile.py --model qwen3-4b --layers 8 --ranks 1 2 --prompt 4096 --response 1024

Every row of the table is a start of its own, of 1 process or several: with layers uncompiled; compiled, with an empty
``TORCHINDUCTOR_CACHE_DIR``; and compiled once more, with the cache that the row before left. A step is old log-probs
and an update of a batch whose prompts, responses and group sizes are drawn anew, so that steps differ in their rows.
Ranks of a row share the folder of the cache and start at the same time. Graphs, hits and misses are of the rank with
the most; a hit is a graph that a process had compiled before, of which Python is traced all the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")

import numpy as np
import torch.distributed as dist
import transformers
from benchmarks.actor_engines import EnginePath, build_engine, shared_model
from benchmarks.common import environment, write_csv
from benchmarks.shapes import SHAPES
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import compile_times, counters
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_torch_device
from verl.utils.distributed import initialize_global_process_group_ray

from verl_pg_plugin.synthetic import Sample, make_batch, random_group

OFF, ON = "compile_layers=False", "compile_layers=True"


@dataclass(frozen=True)
class Row:
    """One start; seconds of the slowest rank."""

    model: str
    options: str
    cache: str
    ranks: int
    steps: int
    first_step_s: float
    second_step_s: float
    median_step_s: float
    compiling_s: float
    graphs_first_step: int
    graphs: int
    cache_hits: int
    cache_misses: int
    device: str
    driver: str
    versions: str
    commit: str


def ragged_samples(step: int, rank: int, args: argparse.Namespace, vocab_size: int) -> list[Sample]:
    """Groups of a step, of 1 to 8 responses each."""
    rng = np.random.default_rng([step, rank])
    samples = []
    for _ in range(args.groups):
        responses = rng.integers(1, args.response + 1, size=rng.integers(1, 9)).tolist()
        samples += random_group(rng, vocab_size, int(rng.integers(2, args.prompt + 1)), responses)
    return samples


def run_step(engine: Any, samples: list[Sample], args: argparse.Namespace) -> float:
    """Seconds of old log-probs and an update."""
    batch = make_batch(samples, max_token_len_per_gpu=args.budget, global_batch_size=len(samples))
    get_torch_device().synchronize()
    dist.barrier()
    start = time.perf_counter()
    with engine.eval_mode():
        engine.infer_batch(tu.index_select_tensor_dict(batch, list(range(len(batch)))))
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, sum_of_log_probs)
        engine.optimizer_step()
    get_torch_device().synchronize()
    return time.perf_counter() - start


def sum_of_log_probs(model_output: dict[str, torch.Tensor], data: Any, dp_group: Any = None) -> tuple[Any, dict]:
    log_probs = model_output["log_probs"].values()
    return -log_probs.sum() / log_probs.numel(), {}


def measure(args: argparse.Namespace) -> None:
    """In a process of a row: run the steps, and let rank 0 write the figures."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    initialize_global_process_group_ray()
    with tempfile.TemporaryDirectory() as folder:
        path = shared_model(args, folder)
        vocab_size = transformers.AutoConfig.from_pretrained(path).get_text_config().vocab_size
        engine = build_engine(path, args, EnginePath("packed", args.measure))
        counters.clear()
        seconds, graphs = [], []
        for step in range(args.steps):
            seconds.append(run_step(engine, ragged_samples(step, dist.get_rank(), args, vocab_size), args))
            graphs.append(counters["stats"]["unique_graphs"])
        dist.barrier()
    times = compile_times(repr="csv", aggregate=True)
    mine = {
        "first_step_s": seconds[0],
        "second_step_s": seconds[1],
        "median_step_s": statistics.median(seconds[2:]),
        "compiling_s": dict(zip(*times, strict=True)).get("_compile.compile_inner", 0.0) if times else 0.0,
        "graphs_first_step": graphs[0],
        "graphs": graphs[-1],
        "cache_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "cache_misses": counters["aot_autograd"]["autograd_cache_miss"],
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        args.figures.write_text(json.dumps({name: max(float(rank[name]) for rank in ranks) for name in mine}))
    dist.destroy_process_group()


def start(options: str, ranks: int, cache: str, arguments: list[str]) -> dict[str, float]:
    """Run one row in processes of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as figures:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, *arguments, "--measure", options, "--figures", figures.name]
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(figures.name).read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"{', '.join(SHAPES)}, or a folder with a config.json")
    parser.add_argument("--layers", type=int, help="use this many layers of the model")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1], help="processes of a start; several are several rows"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--groups", type=int, default=3, help="prompts of a step, per rank")
    parser.add_argument("--prompt", type=int, default=96, help="longest prompt")
    parser.add_argument("--response", type=int, default=32, help="longest response")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch; as many as the longest group by default")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--no-gradient-checkpointing", action="store_true")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps below 3 leaves no step behind the first two")
    args.budget = args.budget or args.prompt + 8 * args.response
    if args.measure:
        measure(args)
        return 0
    about = environment()
    rows = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="bench_compile_") as cache:
            for options, state in ((OFF, "-"), (ON, "empty"), (ON, "kept")):
                figures = start(options, ranks, cache, sys.argv[1:])
                whole = {name: int(figures.pop(name)) for name in list(figures) if "graphs" in name or "cache" in name}
                row = Row(args.model, options, state, ranks, args.steps, **figures, **whole, **about)  # type: ignore[arg-type]
                rows.append(row)
                sys.stderr.write(f"{asdict(row)}\n")  # a run that is cut short leaves what it has measured
    show(rows)
    if args.csv:
        write_csv(rows, args.csv)
    return 0


def show(rows: list[Row]) -> None:
    table = Table(
        "ranks", "layers", "cache", "first step s", "second", "median", "compiling s", "graphs", "hits", "misses"
    )
    for row in rows:
        seconds = (f"{value:.3f}" for value in (row.first_step_s, row.second_step_s, row.median_step_s))
        graphs = f"{row.graphs_first_step} then {row.graphs}"
        cells = [str(row.ranks), row.options, row.cache, *seconds, f"{row.compiling_s:.1f}", graphs]
        table.add_row(*cells, str(row.cache_hits), str(row.cache_misses))
    console = Console(width=150)
    console.print(table)
    console.print(
        f"{rows[0].model}, {rows[0].steps} steps, {rows[0].device}, {rows[0].versions}, commit {rows[0].commit}"
    )


if __name__ == "__main__":
    sys.exit(main())
