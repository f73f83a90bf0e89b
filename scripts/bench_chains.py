"""CPU time of cutting oversized tries into chains, on one core.

    python scripts/bench_chains.py [--repeats 3]

Cases that are larger than any mini-batch: 65,536 sequences in groups of 8 to 64 that all exceed the budget, the same
behind a chat template's first tokens, groups of 256 and one of all with responses of 32 to 64 tokens, and one trie of
4,096 sequences whose neighbours share up to 200 segments. Carried rows and copied keys take what they do at the shape
of Qwen3-4B. "seconds" is the best of the repeats, in processor time, for an update and for a forward-only phase.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl is imported: its platform is chosen once

import numpy as np
import torch
from benchmarks.shapes import config_of
from rich.console import Console
from rich.table import Table
from verl_pg_plugin.batching.chains import ChainPlan, cut_with_chains
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits
from verl_pg_plugin.cost.row_memory import RowMemory

from verl_pg_plugin.layout import PrefixOrder

MEMORY = RowMemory.of(config_of("qwen3-4b"), torch.bfloat16, checkpointing=True, keeps_attention=True)


def groups(
    rng: np.random.Generator, num_sequences: int = 65_536, prompt: int = 1024, response: int = 512, preamble: int = 0
) -> PrefixOrder:
    """Groups of 8 to 64 responses to a prompt; all prompts begin with the same ``preamble``."""
    shared: list[int] = []
    while len(shared) < num_sequences:
        shared += [preamble] + [prompt - 1] * (int(rng.choice([8, 16, 32, 64])) - 1)
    shared[0] = 0
    new = rng.integers(response // 2, response, num_sequences)
    return PrefixOrder(np.arange(num_sequences), prompt - 1 + new, np.array(shared[:num_sequences]))


def short_responses(rng: np.random.Generator, n: int, num_sequences: int = 65_536, prompt: int = 2048) -> PrefixOrder:
    """Groups of ``n``, of which each sequence copies a long prompt for a few tokens."""
    shared = np.where(np.arange(num_sequences) % n, prompt - 1, 0)
    return PrefixOrder(np.arange(num_sequences), prompt - 1 + rng.integers(32, 64, num_sequences), shared)


def trie(rng: np.random.Generator, num_sequences: int = 4096, depth: int = 200, segment: int = 20) -> PrefixOrder:
    """Neighbours that part after 1 to ``depth`` segments."""
    shared = rng.integers(1, depth, num_sequences) * segment
    shared[0] = 0
    rows = np.maximum(shared, np.append(shared[1:], 0)) + rng.integers(1, 100, num_sequences)
    return PrefixOrder(np.arange(num_sequences), rows, shared)


def measure(order: PrefixOrder, max_rows: int, forward_only: bool, repeats: int) -> tuple[float, ChainPlan]:
    seconds = []
    limits = MicroBatchLimits(max_rows, copies=MEMORY.copies(forward_only))
    for _ in range(repeats):
        start = time.process_time()
        plan = cut_with_chains(order, limits, MEMORY.weights(forward_only), forward_only=forward_only)
        seconds.append(time.process_time() - start)
    return min(seconds), plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    table = Table("case", "budget", "phase", "seconds", "parts", "chains", "carried", "exported", "recomputed")
    cases = [("65,536 in groups", groups(rng), 3072), ("with a preamble of 20", groups(rng, preamble=20), 3072)]
    cases += [(f"short, groups of {n:,}", short_responses(rng, n), 16_384) for n in (256, 65_536)]
    cases += [("4,096 in a trie", trie(rng), m) for m in (8192, 65_536)]
    for name, order, max_rows in cases:
        for phase, forward_only in (("update", False), ("forward only", True)):
            seconds, plan = measure(order, max_rows, forward_only, arguments.repeats)
            figures = (len(plan.parts), plan.num_chains, plan.carried_rows, plan.exported_rows, plan.recomputed_rows)
            table.add_row(name, str(max_rows), phase, f"{seconds:.2f}", *map(str, figures))
    Console().print(table)


if __name__ == "__main__":
    main()
