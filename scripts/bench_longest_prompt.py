"""Find the longest prompt whose update fits the GPU, stock and packed, by bisection.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python scripts/bench_longest_prompt.py --model qwen3-4b \
        --response 1024 --n 2 --between 16384 163840 --within 8192

One group of n responses, one update with SGD (no optimizer state), gradient checkpointing, no entropy. The token budget
is one sequence, verl's minimum. So stock verl's memory is that of two responses for any n above one: the second
backward runs with the first's gradients in memory. ``--memory-gib 48`` limits torch's allocations to those of a smaller
GPU.
"""

import argparse
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_actor import loss_of_phase, run_phase
from benchmarks.actor_cases import Case
from benchmarks.actor_engines import EnginePath, add_engine_arguments, build_engine, join_process_group, shared_model
from benchmarks.batches import make_batch
from benchmarks.common import environment, free_memory, pinned_copies, write_csv
from rich.console import Console
from torch import distributed as dist

console = Console(width=150)
COLUMNS = """
model path prompt response n fits seconds peak_gib host_gib level memory_gib device driver versions commit
"""


class Row(namedtuple("Row", COLUMNS)):
    """One update; seconds and peak GiB are NaN if it did not fit."""


def try_prompt(prompt: int, engine: Any, path: EnginePath, args: argparse.Namespace, vocab_size: int) -> Row:
    """Run one update. Running out of memory is a result; other errors are raised."""
    samples = Case(prompt, str(args.response), str(args.n), 1).rows(vocab_size, world_size=1).samples
    batch = make_batch(
        samples,
        max_token_len_per_gpu=prompt + args.response,
        use_remove_padding=path.unpadded,
        use_dynamic_bsz=True,
        use_fused_kernels=path.has("fused"),
        global_batch_size=len(samples),
    )
    outcome: dict[str, Any] = {**dict.fromkeys(("seconds", "peak_gib", "host_gib"), float("nan")), "level": ""}
    fits = True
    try:
        done = run_phase(engine, "update_actor", batch, loss_of_phase("update_actor", path, args), entropy=False)
        outcome = {name: done[name] for name in outcome}
    except torch.OutOfMemoryError as error:
        fits = False
        console.print(str(error), markup=False)
    figures = f"{outcome['seconds']:.1f} s, {outcome['peak_gib']:.1f} GiB {outcome['level']}" if fits else "-"
    console.print(f"{path} P={prompt}: {figures}")
    setting = (args.model, str(path), prompt, args.response, args.n, fits)
    return Row(*setting, **outcome, memory_gib=args.memory_gib, **environment())


def bisect(try_prompt: Callable[[int], Row], low: int, high: int, within: int) -> Iterator[Row]:
    """Yield every try; bisect to ``within`` tokens unless ``high``, which is tried first, fits."""
    yield (first := try_prompt(high))
    if first.fits or low == high:
        return
    yield (second := try_prompt(low))
    while second.fits and high - low > within:
        middle = (low + high) // 2 // 1024 * 1024
        yield (row := try_prompt(middle))
        low, high = (middle, high) if row.fits else (low, middle)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.set_defaults(optimizer="SGD", ulysses=1, entropy=False)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--between", nargs=2, type=int, default=(16384, 163840), metavar=("LOW", "HIGH"))
    parser.add_argument("--within", type=int, default=8192, help="tokens, at least 2048")
    parser.add_argument("--memory-gib", type=float, help="limit of torch's allocations; default: all of the GPU")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    args.memory_gib = min(args.memory_gib or total_gib, total_gib)
    torch.cuda.set_per_process_memory_fraction(args.memory_gib / total_gib, 0)

    join_process_group()
    console.print(pinned_copies())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench_longest_prompt_") as folder:
        model_path = shared_model(args, folder)
        vocab_size = transformers.AutoConfig.from_pretrained(model_path).vocab_size
        for path in args.paths:
            # An engine that ran out of memory stopped within a backward, so every try builds a new one.
            def attempt(prompt: int, path: EnginePath = path) -> Row:
                row = try_prompt(prompt, build_engine(model_path, args, path), path, args, vocab_size)
                free_memory()
                return row

            for row in bisect(attempt, *args.between, max(args.within, 2048)):
                rows.append(row)
                if args.csv:
                    write_csv(rows, args.csv)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
