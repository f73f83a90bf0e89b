"""Where the time of one phase goes: seconds of the device by kernel class, and what it waited for.

    python scripts/profile_actor.py --model qwen3-4b --optimizer SGD --cases 8192,1024,4 \
        --paths rmpad packed packed:compile_layers=True --csv docs/data/profile_4b.csv
    python scripts/plot_profile.py docs/data/profile_4b.csv --out docs/images/profile_4b.png

The phases of ``bench_actor.py`` on the same engines and batches, once under torch's profiler after warm-up. Kernels
are classed by their names (``benchmarks/kernel_classes.py``); those that the head and its backward launch are the
head's, and those of the optimizer's step the optimizer's. Idle is the wall clock without all times in which the device
ran anything, and is told apart by what the host was at: planning, inputs of a micro-batch, forward, backward,
optimizer. A profiled run is slower on the host than others: ``seconds_unprofiled`` beside it is the last run of the
warm-up. On a CPU operators stand for kernels, which rehearses the script and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")

import torch.distributed as dist
import transformers
from bench_actor import run_phase
from benchmarks.actor_cases import PHASES, AnyCase, Case, parse_case, rows_of_ranks
from benchmarks.actor_engines import EnginePath, add_engine_arguments, build_engine, shared_model
from benchmarks.common import environment, write_csv
from benchmarks.device_time import PhaseProfile, device_activities, marked, read_profile
from benchmarks.kernel_classes import CLASSES, OTHER
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from torch.profiler import profile
from verl.utils.device import get_torch_device
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.synthetic import make_batch

NUM_UNNAMED = 12  # kernels without a class that are listed, the longest ones


@dataclass(frozen=True)
class Row:
    """Seconds of rank 0 in one class of a path's phase, and their share of the wall clock.

    ``kind`` is ``device`` (``name`` is a kernel class; the rows of a path add up to the wall clock, or to more where
    streams ran at once), ``idle`` (the device's idle seconds by what the host did), ``host`` (seconds of the host by
    what it did) or ``unnamed`` (a kernel of the class ``other``).
    """

    model: str
    case: str
    path: str
    kernel: str
    phase: str
    kind: str
    name: str
    seconds: float
    share: float
    seconds_wall: float
    seconds_unprofiled: float
    micro_batches: int
    world_size: int
    device: str
    driver: str
    versions: str
    options: str
    commit: str


def parse_text_case(text: str) -> AnyCase:
    """As ``bench_actor.py`` takes cases, those of text; ``P,R,n`` is one prompt."""
    case = parse_case(f"{text},1" if text.count(",") == 2 and ":" not in text else text)
    if case.pictures:
        raise argparse.ArgumentTypeError(f"{text}: cases with pictures cannot be profiled")
    return case


def batch_of(case: AnyCase, path: EnginePath, config: Any, args: argparse.Namespace) -> TensorDict:
    """This rank's part of the case."""
    rows = case.rows(config.vocab_size, dist.get_world_size())
    parts = rows_of_ranks(rows, path.stock, ModelFlops.of_config(config), dist.get_world_size())
    return make_batch(
        [rows.samples[row] for row in parts[dist.get_rank()]],
        max_token_len_per_gpu=path.budget or args.max_token_len,
        use_remove_padding=path.unpadded,
        use_dynamic_bsz=path.unpadded,
        micro_batch_size_per_gpu=case.largest_group,
        global_batch_size=len(rows.samples),
    )


def profile_phase(
    engine: Any, phase: str, batch: TensorDict, args: argparse.Namespace, trace: Path | None
) -> tuple[PhaseProfile, float]:
    """The profile of one run, and the seconds of the run before it, which no profiler slowed down."""
    actor = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.01 if args.entropy else 0.0
    )
    run = partial(run_phase, engine, phase, batch, partial(ppo_loss, config=actor), args.entropy)
    with marked(engine):
        for _ in range(args.warmup):
            unprofiled = run().seconds
        with profile(activities=device_activities()):  # the first of a process loads the profiler itself
            get_torch_device().synchronize()
        with profile(activities=device_activities()) as profiler:
            run()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    return read_profile(profiler.events(), torch.cuda.is_available()), unprofiled


def rows_of(found: PhaseProfile, about: dict[str, Any]) -> list[Row]:
    """One row for each class, stage and kernel without a class."""
    unnamed = dict(list(found.unnamed.items())[:NUM_UNNAMED])
    tables = {"device": found.classes, "idle": found.idle, "host": found.host, "unnamed": unnamed}
    return [
        Row(kind=kind, name=name, seconds=seconds, share=seconds / found.wall, **about)
        for kind, table in tables.items()
        for name, seconds in table.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument("--cases", nargs="+", type=parse_text_case, default=[Case(512, "64", "8", 4)])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=["update_actor"])
    parser.add_argument("--warmup", type=int, default=2, help="runs before the profiled one, at least 1")
    parser.add_argument("--traces", type=Path, help="folder for the traces, for Perfetto or chrome://tracing")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if args.warmup < 1:
        parser.error("--warmup: at least 1")

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29579", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    initialize_global_process_group_ray()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="profile_actor_") as folder:
        model_path = shared_model(args, folder)
        for path in sorted(args.paths, key=lambda path: path.stock):
            rows += profiles_of(path, model_path, args)
            if args.csv and dist.get_rank() == 0:
                write_csv(rows, args.csv)  # after each path, so that a run cut short leaves what it has
    if dist.get_rank() == 0:
        report(rows)
    dist.destroy_process_group()
    return 0


def profiles_of(path: EnginePath, model_path: str, args: argparse.Namespace) -> list[Row]:
    """Every case and phase of one path."""
    torch._dynamo.reset()
    config = transformers.AutoConfig.from_pretrained(model_path)
    engine = build_engine(model_path, args, path)
    rows = []
    for case in args.cases:
        batch = batch_of(case, path, config, args)
        for phase in args.phases:
            trace = args.traces and args.traces / f"{path}-{case}-{phase}.json.gz".replace("/", "_")
            found, unprofiled = profile_phase(engine, phase, batch, args, trace)
            about = {
                "model": args.model,
                "case": str(case),
                "path": str(path),
                "kernel": "stock" if path.stock else engine.sharing.kernel.name,
                "phase": phase,
                "seconds_wall": found.wall,
                "seconds_unprofiled": unprofiled,
                "micro_batches": found.micro_batches,
                "world_size": dist.get_world_size(),
                "options": f"dtype={args.dtype} optimizer={args.optimizer} entropy={args.entropy}",
                **environment(),
            }
            rows += rows_of(found, about)
    del engine
    gc.collect()
    get_torch_device().empty_cache()
    return rows


def report(rows: list[Row]) -> None:
    """A column for each path and phase; what has no class is named below."""
    console = Console(width=150)
    runs = list(dict.fromkeys((row.case, row.phase, row.path, row.kernel) for row in rows))
    table = Table("", *("\n".join(run) for run in runs))
    for kind, names in (("device", CLASSES), *((kind, _names(rows, kind)) for kind in ("idle", "host"))):
        table.add_section()
        for name in names:
            found = {
                (row.case, row.phase, row.path, row.kernel): row for row in rows if (row.kind, row.name) == (kind, name)
            }
            cells = [f"{found[run].seconds:.4f} s  {found[run].share:6.1%}" if run in found else "" for run in runs]
            table.add_row(name if kind == "device" else f"{kind}: {name}", *cells)
    table.add_section()
    walls = {(row.case, row.phase, row.path, row.kernel): row for row in rows}
    table.add_row("wall", *(f"{walls[run].seconds_wall:.4f} s" for run in runs))
    table.add_row("not profiled", *(f"{walls[run].seconds_unprofiled:.4f} s" for run in runs))
    table.add_row("micro-batches", *(str(walls[run].micro_batches) for run in runs))
    planning = {
        (row.case, row.phase, row.path, row.kernel): row.seconds / row.micro_batches
        for row in rows
        if (row.kind, row.name) == ("host", "planning")
    }
    table.add_row("planning of a micro-batch", *(f"{planning[run]:.4f} s" for run in runs))
    console.print(table)
    for row in rows:
        if row.kind == "unnamed":
            console.print(f"{OTHER}, {row.path}: {row.share:.2%} {row.name[:100]}")
    if rows:
        console.print(f"{rows[0].device}, driver {rows[0].driver}, {rows[0].versions}, commit {rows[0].commit}")


def _names(rows: list[Row], kind: str) -> list[str]:
    return list(dict.fromkeys(row.name for row in rows if row.kind == kind))


if __name__ == "__main__":
    sys.exit(main())
