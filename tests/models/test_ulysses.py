"""Tokens spread over a Ulysses group of gloo processes, against one sequence at a time in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    set_ulysses_sequence_parallel_group,
    ulysses_pad_and_slice_inputs,
)

from tests.engine.ranks import on_ranks
from tests.models.models import LAYOUT, grouped, load, packed, padded, reference, result, save_qwen3, unpack
from tests.support import Result, assert_same
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.interface import ATTENTION
from verl_pg_plugin.attention.kernels import select_kernel


def average(gathered: Result) -> Result:
    """Gradients as FSDP averages them over the ranks."""
    for gradient in gathered.gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gathered


def labels_only(model: Any) -> Result:
    tokens, head_index = (torch.from_numpy(array) for array in (LAYOUT.input_ids, LAYOUT.head_index))
    logits = model(tokens.unsqueeze(0), prefix_grouper=LAYOUT, logits_to_keep=head_index).logits
    every_token = logits.new_zeros(1, LAYOUT.num_tokens, logits.shape[-1]).index_copy(1, head_index, logits)
    return result(model, unpack(every_token))


def sliced_by_the_caller(model: Any) -> Result:
    """As verl's engine does it: the caller slices the inputs and gathers the outputs."""
    tokens, position_ids, num_padding = ulysses_pad_and_slice_inputs(
        torch.from_numpy(LAYOUT.input_ids).unsqueeze(0),
        torch.from_numpy(LAYOUT.position_ids).unsqueeze(0),
        dist.get_world_size(),
    )
    ulysses = PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"), group=dist.group.WORLD)
    logits = model(tokens, position_ids=position_ids, prefix_grouper=ulysses).logits
    logits = gather_outputs_and_unpad(logits, gather_dim=1, unpad_dim=1, padding_size=num_padding)
    assert ulysses.calls[ATTENTION] == model.config.num_hidden_layers
    return result(model, unpack(logits))


def run_rank(rank: int, exact: list[str], odd_heads: str) -> None:
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    try:
        for path in exact:
            for run in (padded, packed, labels_only, sliced_by_the_caller):
                assert_same(average(run(load(path).train())), reference(path))
            model = load(path).train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            assert_same(average(packed(model)), reference(path))
        with pytest.raises(ValueError, match="cannot be spread over a Ulysses group"):
            grouped(load(exact[0]))
        with pytest.raises(ValueError, match="3 query and 3 key/value heads cannot be spread over 2 ranks"):
            packed(load(odd_heads))
    finally:
        set_ulysses_sequence_parallel_group(None)


def test_every_rank_gets_what_one_process_computes(qwen3: str, split_llama: str, tmp_path: Path) -> None:
    assert LAYOUT.num_tokens % 2, "the last rank has padding"
    repeated = save_qwen3(tmp_path / "repeated", num_key_value_heads=1)  # one key/value head, on both ranks
    odd_heads = save_qwen3(tmp_path / "odd", num_attention_heads=3, num_key_value_heads=3)
    on_ranks(2, run_rank, [qwen3, split_llama, repeated], odd_heads)
