"""Time of planning a mini-batch on the CPU: 1,024 sequences of 10k tokens, on one core.

    python scripts/bench_layout.py [--repeats 7] [--max-token-len 32768] [--assert-under 0.5]
    python scripts/bench_layout.py --growth 2048 8192 32768 65536 [--repeats 3] [--assert-under 2]

"plan" is what an engine runs before each mini-batch, ``plan_micro_batches``: read verl's batch, sort, cut into
micro-batches, lay each out and select its rows. The columns after it time its steps of index maths alone. "cuts" are
micro-batches, "dedup" is logical over physical tokens.

``--growth`` times the two plans that compare sequences with one another, over the number of sequences: dealing them to
ranks (``balance_groups``) and cutting them into micro-batches, from lengths alone: into chains as an engine does by
default, for an update at the shape of Qwen3-4B (``cut_with_chains``), and without carrying (``cut_micro_batches``).
"""

from __future__ import annotations

import os

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl is imported: its platform is chosen once

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from benchmarks.shapes import config_of
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl_pg_plugin.batching.chains import cut_with_chains
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.cost.row_memory import RowMemory

from verl_pg_plugin.attention.kernels.selection import select_kernel
from verl_pg_plugin.batching.chains import cut_with_chains
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.engine.batch.micro_batch_plan import plan_micro_batches
from verl_pg_plugin.engine.batch.sequences import lay_out_packed, read_sequences
from verl_pg_plugin.engine.sharing_modes import PackedMode
from verl_pg_plugin.layout import PrefixOrder, build_prefix_order
from verl_pg_plugin.planning.balance import balance_groups
from verl_pg_plugin.planning.sessions import order_by_sessions

MEMORY = RowMemory.of(config_of("qwen3-4b"), torch.bfloat16, checkpointing=True, keeps_attention=True)
FLOPS = ModelFlops.of_config(config_of("qwen3-8b"))
PROMPT = 512
VOCAB = 151_936

PACKED_MODE = PackedMode(kernel=select_kernel("sdpa", "cpu"))


def make_batch(num_sequences: int, n: int, prompt_length: int, response_length: int, max_token_len: int) -> TensorDict:
    """Groups of ``n`` random responses to one random prompt, shuffled as dispatch leaves them."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCAB, (num_sequences // n, prompt_length), generator=generator).repeat_interleave(n, 0)
    prompts = prompts[torch.randperm(num_sequences, generator=generator)]
    responses = torch.randint(VOCAB, (num_sequences, response_length), generator=generator)
    length = prompt_length + response_length
    fields = {
        "prompts": jagged(prompts),
        "responses": jagged(responses),
        "input_ids": jagged(torch.cat([prompts, responses], dim=1)),
        "position_ids": jagged(torch.arange(length).expand(num_sequences, length)),
    }
    batch = TensorDict(fields, batch_size=num_sequences)
    tu.assign_non_tensor(batch, use_dynamic_bsz=True, max_token_len_per_gpu=max_token_len, temperature=1.0)
    return batch


def jagged(rows: torch.Tensor) -> torch.Tensor:
    offsets = torch.arange(len(rows) + 1) * rows.shape[1]
    return torch.nested.nested_tensor_from_jagged(rows.reshape(-1), offsets)


def timed(function: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each call after one warm-up."""
    function()
    seconds = []
    for _ in range(repeats):
        start = clock()
        function()
        seconds.append(clock() - start)
    return seconds


def measure(batch: TensorDict, max_token_len: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of the whole plan and of each step of index maths."""
    sequences = read_sequences(batch)
    order = build_prefix_order(sequences.tokens, sequences.offsets)
    limits = MicroBatchLimits(max_rows=max_token_len)
    cut = cut_micro_batches(order, limits)
    steps: dict[str, Callable[[], object]] = {
        "plan": lambda: plan_micro_batches(batch, None, 1, PACKED_MODE),
        "read": lambda: read_sequences(batch),
        "sort": lambda: build_prefix_order(sequences.tokens, sequences.offsets),
        "cut": lambda: cut_micro_batches(order, limits),
        "layout": lambda: [lay_out_packed(sequences.select(rows)) for rows in cut],
    }
    return {name: timed(step, repeats) for name, step in steps.items()}


def growing_plans(num_sequences: int) -> dict[str, Callable[[], object]]:
    """Plans over sequences of long-tailed lengths; a case is named by what makes it slow."""
    rng = np.random.default_rng(0)
    responses = np.minimum(rng.lognormal(6.5, 1.0, num_sequences).astype(np.int64) + 1, 8192)

    def balance(n: int, num_ranks: int) -> Callable[[], object]:
        group = np.arange(num_sequences) // n
        prompts = rng.integers(200, 4000, num_sequences)[group]

        def deal() -> object:
            order = order_by_sessions(group, np.arange(len(group)), np.zeros_like(group), prompts, responses)
            return balance_groups(order, group, responses, FLOPS.segments, num_ranks)

        return deal

    def cut(n: int, max_rows: int | None, at_least: int = 1) -> Callable[[], object]:
        shared = np.where(np.arange(num_sequences) % n, PROMPT - 1, 0)
        order = PrefixOrder(np.arange(num_sequences), PROMPT - 1 + responses, shared)
        return lambda: cut_micro_batches(order, MicroBatchLimits(max_rows=max_rows), at_least)

    def chains(n: int) -> Callable[[], object]:
        shared = np.where(np.arange(num_sequences) % n, PROMPT - 1, 0)
        order = PrefixOrder(np.arange(num_sequences), PROMPT - 1 + responses, shared)
        limits = MicroBatchLimits(max_rows=16_384, copies=MEMORY.copies(forward_only=False))
        return lambda: cut_with_chains(order, limits, MEMORY.weights(forward_only=False))

    return {
        "balance n 1, 8 ranks": balance(1, 8),
        "balance n 1, 2 ranks": balance(1, 2),
        "balance n 8, 8 ranks": balance(8, 8),
        "cut n 1, one each": cut(1, None, at_least=num_sequences),
        "cut n 1": cut(1, 16_384),
        "cut n 8": cut(8, 16_384),
        "split one group": cut(num_sequences, None, at_least=min(num_sequences, 8192)),
        "chains n 8": chains(8),
        "chains n 256": chains(256),
        "chains, one group": chains(num_sequences),
    }


def report_growth(sizes: list[int], repeats: int) -> float:
    """Print the medians; the largest in seconds."""
    names = list(growing_plans(8))
    table = Table("sequences", *names, title="CPU time of one core: median ± half range, ms")
    slowest = 0.0
    for size in sizes:
        seconds = [timed(plan, repeats, time.process_time) for plan in growing_plans(size).values()]
        slowest = max(slowest, *map(statistics.median, seconds))
        table.add_row(f"{size:,}", *map(milliseconds, seconds))
    Console(width=190).print(table)
    return slowest


def milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ± {(max(seconds) - min(seconds)) * 500:.0f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-sequences", type=int, default=1024)
    parser.add_argument("--prompt-length", type=int, default=8192)
    parser.add_argument("--response-length", type=int, default=2048)
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[8, 32, 1])
    parser.add_argument("--max-token-len", type=int, default=32_768, help="physical tokens of a micro-batch")
    parser.add_argument("--growth", type=int, nargs="+", metavar="SEQUENCES", help="time these sizes instead")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--assert-under", type=float, metavar="SECONDS", help="exit 1 if a median plan takes longer")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)
    slowest = report_growth(args.growth, args.repeats) if args.growth else report_plan(args)
    if args.assert_under is not None and slowest >= args.assert_under:
        sys.stderr.write(f"slowest median plan {slowest:.3f} s, not under {args.assert_under} s\n")
        return 1
    return 0


def report_plan(args: argparse.Namespace) -> float:
    """Print the medians of a whole plan and its steps; the largest of a plan in seconds."""
    length = args.prompt_length + args.response_length
    table = Table(title=f"{args.num_sequences:,} sequences of {length:,} tokens, one core: median ± half range, ms")
    for column in ("n", "cuts", "dedup", "plan", "read", "sort", "cut", "layout"):
        table.add_column(column, justify="right", no_wrap=True)
    medians = []
    for n in args.group_sizes:
        batch = make_batch(args.num_sequences, n, args.prompt_length, args.response_length, args.max_token_len)
        layouts = plan_micro_batches(batch, None, 1, PACKED_MODE).layouts
        dedup = sum(layout.num_logical_tokens for layout in layouts) / sum(layout.num_tokens for layout in layouts)
        seconds = measure(batch, args.max_token_len, args.repeats)
        medians.append(statistics.median(seconds["plan"]))
        table.add_row(str(n), str(len(layouts)), f"{dedup:.2f}", *map(milliseconds, seconds.values()))
    Console().print(table)
    return max(medians)


if __name__ == "__main__":
    sys.exit(main())
