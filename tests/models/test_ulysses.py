"""Rows spread over a Ulysses group of gloo processes, against one sequence at a time in one process."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    set_ulysses_sequence_parallel_group,
    ulysses_pad_and_slice_inputs,
)

from tests.models.models import SAMPLES, layout_of, load, pad, reference, result, unpack
from tests.models.test_forward import responses, upstream_batch
from tests.support import Result, assert_same
from verl_pg_plugin.attention.interface import ATTENTION
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.context import UlyssesAttention
from verl_pg_plugin.models.split_llama.modeling_split_llama import SplitLlamaConfig

LAYOUT = layout_of(SAMPLES)


def start(run: Callable, num_ranks: int, *args: Any) -> None:
    """Run a function on gloo ranks; the fork server imports verl and transformers once for all of them."""
    multiprocessing.set_forkserver_preload(["tests.models.models", SplitLlamaConfig.__module__])
    mp.start_processes(run, args, nprocs=num_ranks, start_method="forkserver")


def average(gathered: Result) -> Result:
    """Gradients as FSDP averages them over the ranks."""
    for gradient in gathered.gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gathered


def padded(model: Any) -> Result:
    input_ids, mask = pad(SAMPLES, "left")
    return result(model, responses(model(input_ids, attention_mask=mask).logits, mask, SAMPLES), SAMPLES)


def packed(model: Any) -> Result:
    rows = torch.from_numpy(LAYOUT.input_ids).unsqueeze(0)
    return result(model, unpack(model(rows, prefix_grouper=LAYOUT).logits, LAYOUT, SAMPLES), SAMPLES)


def head_rows_only(model: Any) -> Result:
    rows = torch.from_numpy(LAYOUT.input_ids).unsqueeze(0)
    head_index = torch.from_numpy(LAYOUT.head_index)
    logits = model(rows, prefix_grouper=LAYOUT, logits_to_keep=head_index).logits
    every_row = logits.new_zeros(1, LAYOUT.num_tokens, logits.shape[-1]).index_copy(1, head_index, logits)
    return result(model, unpack(every_row, LAYOUT, SAMPLES), SAMPLES)


def sliced_by_the_caller(model: Any) -> Result:
    """As verl's engine does it: the caller slices the inputs and gathers the outputs."""
    rows, position_ids, num_padding = ulysses_pad_and_slice_inputs(
        torch.from_numpy(LAYOUT.input_ids).unsqueeze(0),
        torch.from_numpy(LAYOUT.position_ids).unsqueeze(0),
        dist.get_world_size(),
    )
    attention = PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"), "cpu")
    ulysses = UlyssesAttention(attention, LAYOUT.num_tokens, dist.group.WORLD)
    logits = model(rows, position_ids=position_ids, prefix_grouper=ulysses).logits
    logits = gather_outputs_and_unpad(logits, gather_dim=1, unpad_dim=1, padding_size=num_padding)
    assert ulysses.calls[ATTENTION] == model.config.num_hidden_layers
    return result(model, unpack(logits, LAYOUT, SAMPLES), SAMPLES)


def run_rank(rank: int, sp_size: int, store: str, paths: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=sp_size)
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    for path in paths:
        expected = reference(path)
        for run in (padded, packed, head_rows_only, sliced_by_the_caller):
            assert_same(average(run(load(path).train())), expected)
        model = load(path).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert_same(average(packed(model)), expected)
    model = load(paths[0])
    grouper, input_ids, position_ids = upstream_batch(SAMPLES, [3, 2, 1])
    with pytest.raises(ValueError, match="cannot be spread over a Ulysses group"):
        model(input_ids, position_ids=position_ids, prefix_grouper=grouper)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("sp_size", [2, 4])
def test_every_rank_gets_what_one_process_computes(sp_size: int, qwen3: str, split_llama: str, tmp_path: Path) -> None:
    # 2 key/value heads: one each on two ranks, repeated on four; the rows divide by none of the sizes.
    assert all(LAYOUT.num_tokens % size for size in (2, 4))
    start(run_rank, sp_size, sp_size, str(tmp_path / "store"), [qwen3, split_llama])


def test_heads_that_cannot_be_spread_are_named(tmp_path: Path, qwen3: str) -> None:
    start(run_three_ranks, 3, str(tmp_path / "store"), qwen3)


def run_three_ranks(rank: int, store: str, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    with pytest.raises(ValueError, match="4 query and 2 key/value heads cannot be spread over 3 ranks"):
        packed(load(path))
    dist.barrier()
    dist.destroy_process_group()
