"""Packing against the plain loops it replaces, at the sizes of a training batch and at tiny ones.

    python scripts/bench_packing.py [--csv FILE]     # CPU
    python scripts/bench_packing.py --device cuda    # the segment sum on the GPU

Every repetition times the loop and then the vectorised version, so a ratio and its spread come from one run.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import environment, write_csv

from benchmarks import packing_reference
from verl_pg_plugin.packing import batch_unsorted_segment_sum, create_pack_group, pack_grouped_data, pack_grpo_data

PAD_TOKEN_ID = 0


@dataclass(frozen=True)
class Case:
    """Two callables with one result; `inner` calls make one timing, so that tiny cases can be timed at all."""

    operation: str
    setting: str
    loop: Callable[[], Any]
    ours: Callable[[], Any]
    inner: int


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds a call; ratios are loop / ours within a repetition."""

    operation: str
    setting: str
    loop_ms: float
    ours_ms: float
    ratio: float
    ratio_q25: float
    ratio_q75: float
    repeats: int
    device: str
    driver: str
    versions: str
    commit: str


def cases(device: str) -> Iterator[Case]:
    for bs, seq, num_segments, inner in ((128, 8192, 32, 1), (2, 64, 4, 100)):
        for order in ("random", "contiguous"):
            arguments = (*segment_input(bs, seq, num_segments, order, device), num_segments)
            setting = f"{bs} x {seq}, {num_segments} segments, {order} ids"
            loop, ours = packing_reference.segment_sum_by_row, batch_unsorted_segment_sum
            yield Case(
                "batch_unsorted_segment_sum", setting, partial(loop, *arguments), partial(ours, *arguments), inner
            )
    if device != "cpu":
        return
    for bs, seq, inner in ((32, 8192, 1), (2, 64, 20)):
        for lengths in ("full", "ragged"):
            batch = grpo_batch(bs, seq, lengths)
            samples = packing_reference.samples_by_row(*batch)
            for pack_num in (1, 3):
                row = {"pack_num": pack_num, "seq_length": pack_num * (seq + 1), "pad_token_id": PAD_TOKEN_ID}
                groups = create_pack_group(samples, pack_num, row["seq_length"])
                setting = f"{bs} x {seq}, {lengths}, pack_num {pack_num}"
                loop, ours = (
                    partial(function, *batch, **row)
                    for function in (packing_reference.pack_batch_by_row, pack_grpo_data)
                )
                yield Case("pack_grpo_data", setting, loop, ours, inner)
                loop, ours = (
                    partial(pack_each, partial(function, **row), groups)
                    for function in (packing_reference.pack_by_sample, pack_grouped_data)
                )
                yield Case("pack_grouped_data", f"{setting}, {len(groups)} calls", loop, ours, inner)


def pack_each(pack: Callable[[Any], Any], groups: list[Any]) -> list[Any]:
    return [pack(group) for group in groups]


def segment_input(bs: int, seq: int, num_segments: int, order: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 values and int64 ids, (bs, seq); `contiguous` ids are sorted in every row, as in a packed row."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(bs, seq, generator=generator)
    ids = torch.randint(0, num_segments, (bs, seq), generator=generator)
    if order == "contiguous":
        ids = ids.sort(dim=1).values
    return values.to(device), ids.to(device)


def grpo_batch(bs: int, seq: int, lengths: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Left-padded prompts in the first half of the columns, right-padded responses in the second."""
    rng = np.random.default_rng(0)
    half, column = seq // 2, np.arange(seq)
    full = np.full((bs, 1), half)
    prompt, response = (full if lengths == "full" else rng.integers(1, half + 1, (bs, 1)) for _ in range(2))
    prompts_mask = ((column >= half - prompt) & (column < half)).astype(np.int64)
    responses_mask = ((column >= half) & (column < half + response)).astype(np.int64)
    return rng.integers(1, 150_000, (bs, seq)), prompts_mask, responses_mask, rng.standard_normal(bs)


def measure(case: Case, repeats: int) -> Row:
    for warm_up in (case.loop, case.ours) * 3:
        milliseconds(warm_up, case.inner)
    times = [(milliseconds(case.loop, case.inner), milliseconds(case.ours, case.inner)) for _ in range(repeats)]
    loop, ours = np.array(times).T
    ratio, q25, q75 = np.percentile(loop / ours, [50, 25, 75])
    figures = (float(f"{figure:.4g}") for figure in (np.median(loop), np.median(ours), ratio, q25, q75))
    return Row(case.operation, case.setting, *figures, repeats, **environment())


def milliseconds(function: Callable[[], Any], calls: int) -> float:
    """A call; on a GPU until the last call has finished there."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = []
    for case in cases(args.device):
        row = measure(case, args.repeats)
        rows.append(row)
        ratio = f"{row.ratio:.2f}x ({row.ratio_q25:.2f}-{row.ratio_q75:.2f})"
        sys.stdout.write(f"{row.operation:28} {row.setting:42} {row.loop_ms:9.4g} {row.ours_ms:9.4g} ms  {ratio}\n")
    if args.csv:
        write_csv(rows, args.csv)


if __name__ == "__main__":
    main()
