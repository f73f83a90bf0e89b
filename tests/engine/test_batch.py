"""Batches are read and moved to the device whole; errors of invalid ones name cause and fix."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.batches import make_batch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from tests.support import actor_loss, full_gradients, group, jagged, update
from verl_pg_plugin.engine.batch import limits_of, read_sequences
from verl_pg_plugin.engine.inputs import SequenceSelector
from verl_pg_plugin.issue import BatchError

SAMPLES = group(5, [3, 2, 4], 1)


def test_temperatures_that_differ_in_the_last_bit_share_no_token() -> None:
    next_float = torch.nextafter(torch.tensor(0.7), torch.tensor(1.0)).item()
    sequences = read_sequences(make_batch(SAMPLES).set("temperature", torch.tensor([0.7, next_float, 0.7])))
    assert sequences.classes is not None
    assert sequences.classes.tolist() == [0, 1, 0]
    assert sequences.select([1, 2]).classes.tolist() == [1, 0]
    layout = sequences.build_layout()
    assert layout.num_tokens == 2 * 4 + sum(len(sample.response) for sample in SAMPLES)
    assert (layout.segment_start == 0).sum() == 2


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_temperature_of_one_element_applies_to_all_samples(shape: tuple[int, ...]) -> None:
    sequences = read_sequences(make_batch(SAMPLES, temperature=torch.full(shape, 0.7)))
    assert sequences.classes is None
    assert sequences.order().num_shared.tolist() == [0, 4, 4]


def test_left_padded_batches_without_position_ids_are_read() -> None:
    """verl's left_right_2_no_padding keeps padded prompts and responses next to the attention mask."""
    ids = [[*s.prompt, *s.response] for s in SAMPLES]
    padding = [[0] * (4 - len(s.response)) for s in SAMPLES]
    mask = [[0, 0, *[1] * len(row), *zeros] for row, zeros in zip(ids, padding, strict=True)]
    fields = {
        "input_ids": jagged(map(torch.tensor, ids)),
        "prompts": torch.tensor([[0, 0, *s.prompt] for s in SAMPLES]),
        "responses": torch.tensor([[*s.response, *zeros] for s, zeros in zip(SAMPLES, padding, strict=True)]),
        "attention_mask": torch.tensor(mask),
    }
    sequences = read_sequences(TensorDict(fields, batch_size=len(SAMPLES)))
    assert sequences.prompt_lengths.tolist() == [5] * len(SAMPLES)
    assert np.array_equal(sequences.tokens, np.concatenate(ids))


def test_the_budget_is_multiplied_by_the_ulysses_ranks() -> None:
    assert limits_of(make_batch(SAMPLES, max_token_len_per_gpu=64), sp_size=2).max_tokens == 2 * 64


def empty_batch() -> TensorDict:
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    fields = dict.fromkeys(("prompts", "responses", "input_ids", "position_ids", "loss_mask"), none)
    empty = TensorDict(fields, batch_size=[0])
    tu.assign_non_tensor(empty, use_dynamic_bsz=True, max_token_len_per_gpu=64, global_batch_size=1)
    return empty


def with_rows(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorDict:
    """A batch with ``change`` applied to each sequence of one field."""
    batch = make_batch(SAMPLES)
    return batch.set(name, jagged(map(change, batch[name].unbind())))


def padded(name: str) -> TensorDict:
    batch = make_batch(SAMPLES)
    return batch.set(name, batch[name].to_padded_tensor(0))


BATCHES: dict[str, tuple[TensorDict, str]] = {
    "no_prompts": (make_batch(SAMPLES).exclude("prompts"), r"no prompts.*use_prefix_grouper=False"),
    "padded_ids": (padded("input_ids"), "left_right_2_no_padding"),
    "negative_token": (with_rows("input_ids", lambda row: -row - 1), "token ids must be in"),
    "mrope_positions": (with_rows("position_ids", lambda row: row.expand(3, -1).T), "do not count 0, 1, 2"),
    "shifted_positions": (with_rows("position_ids", lambda row: row + 1), "do not count 0, 1, 2"),
    "dense_positions": (padded("position_ids"), "position_ids must be jagged like input_ids.*left_right_2_no_padding"),
    "short_response": (with_rows("responses", lambda row: row[len(row) // 4 :]), "sequence 2: .* 9 tokens, .* 8;"),
    "long_response": (with_rows("responses", lambda row: torch.cat([row, row[:1]])), "sequence 0: .* 8 tokens, .* 9;"),
    "no_sequences": (empty_batch(), "empty on this rank"),
    "no_bound": (make_batch(SAMPLES, max_token_len_per_gpu=float("inf")), "max_token_len_per_gpu=inf bounds no micro"),
    "no_number": (make_batch(SAMPLES, max_token_len_per_gpu="8k"), "max_token_len_per_gpu=8k bounds no micro"),
    "above_the_budget": (make_batch(SAMPLES, max_token_len_per_gpu=7), r"needs 8 tokens.*ppo_max_token_len_per_gpu"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_an_invalid_batch_is_an_error_without_side_effects(packed: Any, case: str) -> None:
    batch, message = BATCHES[case]
    packed.optimizer_zero_grad()
    with packed.train_mode(), pytest.raises(ValueError, match=message):
        packed.forward_backward_batch(batch, actor_loss())
    assert not any("prefix_grouper" in name for name in batch.keys()), "no field of ours remains"  # noqa: SIM118
    assert all(p.grad is None for p in packed.module.parameters())


def narrowed(field: torch.Tensor) -> torch.Tensor:
    """The same sequences, with an unused value after each."""
    wide = [torch.cat([row, row[:1]]) for row in field.unbind()]
    lengths = torch.tensor([len(row) - 1 for row in wide])
    offsets = torch.tensor([0, *(len(row) for row in wide)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(wide), offsets=offsets, lengths=lengths)


def test_jagged_fields_with_gaps_give_the_same_gradients(packed: Any) -> None:
    batch = make_batch(SAMPLES)
    expected = update(packed, batch).gradients
    for name in ("input_ids", "position_ids", "responses", "old_log_probs", "advantages", "loss_mask"):
        batch[name] = narrowed(batch[name])
    assert batch["input_ids"].lengths() is not None
    with packed.train_mode():
        packed.optimizer_zero_grad()
        packed.forward_backward_batch(batch, actor_loss())
    assert all(torch.equal(gradient, expected[name]) for name, gradient in full_gradients(packed.module).items())


def test_multimodal_inputs_are_refused_unless_empty() -> None:
    batch = make_batch(SAMPLES)
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [{}, {"pixel_values": None}, {}])
    assert len(read_sequences(batch).prompt_lengths) == 3
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [{}, {"pixel_values": torch.ones(1)}, {}])
    with pytest.raises(BatchError, match=r"sequence 1: the processor returns pixel_values.*use_prefix_grouper=False"):
        read_sequences(batch)


CHOSEN = [2, 0, 3]


def mini_batch() -> TensorDict:
    """A batch with a dense field, multi-dimensional positions, and two fields of one ragged shape."""
    batch = make_batch([*group(9, [4, 7, 2], 1), *group(5, [3], 2)])
    batch["weight"] = torch.arange(4.0)
    lengths = batch["input_ids"].offsets().diff().tolist()
    batch["position_ids"] = tu.nested_tensor_from_tensor_list(
        [torch.arange(4 * n).view(4, n) for n in lengths], ragged_idx=2
    )
    batch["twice"] = batch["advantages"] * 2
    tu.assign_non_tensor_stack(batch, "uid", ["a", "b", "c", "d"])
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [{}] * 4)
    return batch


def select(batch: TensorDict, device: Any) -> TensorDict:
    return SequenceSelector(batch).take(CHOSEN, torch.device(device))


def assert_chosen(selected: TensorDict, batch: TensorDict) -> None:
    """Check the chosen sequences' fields against verl's own selection."""
    expected = tu.index_select_tensor_dict(batch.exclude("position_ids", "multi_modal_inputs"), CHOSEN)
    assert set(selected.keys()) == set(expected.keys())
    for name, field in expected.items():
        if isinstance(field, torch.Tensor):
            pairs = zip(selected[name].unbind(), field.unbind(), strict=True)
            assert all(torch.equal(got.cpu(), want) for got, want in pairs), name


def test_selected_batches_are_on_the_device_with_every_field_of_a_loss() -> None:
    moved = select(mini_batch(), get_device_id())
    assert moved.to(get_device_id()) is moved
    assert_chosen(moved, mini_batch())
    assert tu.get(moved, "uid") == ["c", "a", "d"]
    assert tu.get_non_tensor_data(moved, "temperature", default=None) == 1.0
    # torch multiplies only tensors of one ragged shape.
    assert torch.equal((moved["twice"] - moved["advantages"]).values(), moved["advantages"].values())
    # Else verl's loss, which pads this field, would compute these on the device and synchronize.
    assert (int(moved["responses"]._maybe_min_seqlen), int(moved["responses"]._maybe_max_seqlen)) == (2, 4)


@pytest.mark.gpu
def test_the_host_goes_on_while_the_gpu_is_at_work() -> None:
    device, batch = torch.cuda.current_device(), mini_batch()
    expected = select(batch, device)  # the first one allocates
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(2_000_000_000)  # about a second
        start = time.perf_counter()
        moved = select(batch, device)
        seconds = time.perf_counter() - start
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seconds < 0.2
    assert moved.to(device) is moved
    assert_chosen(moved, batch)
    assert_chosen(expected, batch)
