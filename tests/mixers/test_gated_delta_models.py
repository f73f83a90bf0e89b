"""Whole models with Gated DeltaNet and attention layers over a trie are those models over every sequence alone."""

import importlib
from unittest.mock import patch

import pytest
import torch

from tests.layout.tries import Batch
from tests.mixers.hybrids import KINDS, build_hybrid, modeling_file, trie_of_depth
from tests.mixers.test_gated_delta_layer import relative
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.interface import ATTENTION, ATTENTION_NAME, register_attention
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.mixers import delta_layer
from verl_pg_plugin.mixers.delta_layer import GATED_DELTA, install

Numbers = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _attention_over_shared_rows() -> None:
    register_attention()


def over_the_trie(kind: str, batch: Batch, checkpointing: bool = False, dtype: torch.dtype = torch.float64) -> Numbers:
    """Log-probs of every sequence's responses one after the other, and every gradient of their weighted sum."""
    model = build_hybrid(kind, dtype, ATTENTION_NAME)
    install(model)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layout = batch.layout()
    rows = PackedAttention(layout, select_kernel("sdpa", "cpu"), "cpu")
    head_index = torch.from_numpy(layout.head_index)
    logits = model(
        input_ids=torch.from_numpy(layout.input_ids).unsqueeze(0),
        position_ids=torch.from_numpy(layout.position_ids).unsqueeze(0),
        use_cache=False,
        prefix_grouper=rows,
        logits_to_keep=head_index,
    ).logits.squeeze(0)
    assert rows.calls == {GATED_DELTA: 3, ATTENTION: 1}
    of_heads = log_probs(logits, torch.from_numpy(layout.labels)[head_index])
    flat = torch.zeros(layout.num_logical_tokens, dtype=dtype).index_copy(
        0, torch.from_numpy(layout.response_index), of_heads[torch.from_numpy(layout.response_head)]
    )
    bounds = zip(batch.offsets.tolist(), batch.prompt_lengths, batch.offsets[1:].tolist(), strict=False)
    return gradients_of(model, torch.cat([flat[start + prompt - 1 : stop - 1] for start, prompt, stop in bounds]))


def alone(kind: str, batch: Batch) -> Numbers:
    model = build_hybrid(kind)
    found = []
    for sequence, prompt in zip(batch.sequences, batch.prompt_lengths, strict=True):
        ids = torch.tensor(sequence)
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, prompt - 1 : -1]
        found.append(log_probs(logits, ids[prompt:]))
    return gradients_of(model, torch.cat(found))


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def gradients_of(model: torch.nn.Module, found: torch.Tensor) -> Numbers:
    weights = torch.randn(len(found), generator=torch.Generator().manual_seed(5)).to(found)
    (found * weights).sum().backward()
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None} | {"log_probs": found.detach()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_log_probs_and_gradients_are_those_of_every_sequence_alone(kind: str, depth: int) -> None:
    batch = trie_of_depth(depth)
    got, want = over_the_trie(kind, batch), alone(kind, batch)
    assert got.keys() == want.keys()
    assert max(relative(got[name], want[name]) for name in want) <= 1e-10


def test_a_state_that_is_not_handed_down_shows_in_the_log_probs() -> None:
    def forget(state: torch.Tensor, num_children: torch.Tensor, total: int) -> torch.Tensor:
        return state.new_zeros(total, *state.shape[1:])

    batch = trie_of_depth(2)
    with patch.object(delta_layer._HandDown, "apply", forget):
        got = over_the_trie("qwen3_next", batch)
    assert (got["log_probs"] - alone("qwen3_next", batch)["log_probs"]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_gradient_checkpointing_changes_no_bit(kind: str) -> None:
    batch = trie_of_depth(3)
    kept, recomputed = (over_the_trie(kind, batch, checkpointing, torch.float32) for checkpointing in (False, True))
    assert kept.keys() == recomputed.keys()
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_the_float64_copy_of_a_modeling_file_is_that_file(kind: str) -> None:
    """In float32 the original, with the same weights, is as close as float32 gets."""
    ids = torch.tensor([trie_of_depth(2).sequences[-1]])
    double, single = (build_hybrid(kind, dtype)(ids, use_cache=False) for dtype in (torch.float64, torch.float32))
    assert relative(single.logits.double(), double.logits) <= 1e-5
    copy, stock = modeling_file(kind, torch.float64), modeling_file(kind, torch.float32)
    assert copy is not stock
    assert stock is importlib.import_module(stock.__name__)
