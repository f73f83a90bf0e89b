"""A batch that packed mode cannot compute stops with its cause and its fix, before anything is computed."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support import actor_loss, clone, full_gradients, group
from verl_pg_plugin.engine.batch import read_sequences
from verl_pg_plugin.modalities.text import BatchError
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = group(5, [3, 2], 1)


def emptied(batch: TensorDict) -> TensorDict:
    none = torch.zeros(1, dtype=torch.int64)
    fields = {
        name: torch.nested.nested_tensor_from_jagged(batch[name].values()[:0], none)
        for name in ("prompts", "responses", "input_ids", "position_ids", "loss_mask")
    }
    empty = TensorDict(fields, batch_size=[0])
    tu.assign_non_tensor(empty, use_dynamic_bsz=True, max_token_len_per_gpu=64, global_batch_size=1)
    return empty


def jagged(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def jagged_like(field: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, field.offsets())


Change = Callable[[torch.Tensor], torch.Tensor] | None
FIELDS: dict[str, tuple[str, Change, str]] = {
    "no_prompts": ("prompts", None, r"no prompts.*use_prefix_grouper=False"),
    "no_responses": ("responses", None, "no responses"),
    "float_ids": (
        "input_ids",
        lambda field: jagged_like(field, field.values().float()),
        r"must be integers, got torch.float32; use torch.int64",
    ),
    "padded_ids": ("input_ids", lambda field: field.to_padded_tensor(0), "left_right_2_no_padding"),
    "negative_token": ("input_ids", lambda field: jagged_like(field, -field.values() - 1), "token ids must lie in"),
    "mrope_positions": (
        "position_ids",
        lambda field: jagged(row.expand(3, -1).T for row in field.unbind()),
        "do not count 0, 1, 2",
    ),
    "shifted_positions": (
        "position_ids",
        lambda field: jagged_like(field, field.values() + 1),
        "do not count 0, 1, 2",
    ),
    "dense_positions": (
        "position_ids",
        lambda field: field.to_padded_tensor(0),
        "position_ids must be jagged like input_ids.*left_right_2_no_padding",
    ),
    "short_response": (
        "responses",
        lambda field: jagged(row[1:] for row in field.unbind()),
        r"sequence 0: input_ids has 8 tokens, prompts and responses together 7",
    ),
    "long_response": (
        "responses",
        lambda field: jagged(torch.cat([row, row[:1]]) for row in field.unbind()),
        r"sequence 0: input_ids has 8 tokens, prompts and responses together 9",
    ),
}
"""A field, what is wrong with it (``None``: it is not there), and the message."""


def with_field(name: str, change: Change) -> TensorDict:
    batch = make_batch(SAMPLES)
    return batch.exclude(name) if change is None else batch.set(name, change(batch[name]))


BATCHES: dict[str, tuple[TensorDict, str]] = {
    **{case: (with_field(name, change), message) for case, (name, change, message) in FIELDS.items()},
    "no_sequences": (emptied(make_batch(SAMPLES)), "empty on this rank"),
    "no_response_token": (make_batch([*SAMPLES, Sample([1, 2], [])]), "sequence 2 has an empty response"),
    "no_prompt_token": (make_batch([*SAMPLES, Sample([], [3, 4])]), "sequence 2 has an empty prompt"),
    "above_the_budget": (
        make_batch(SAMPLES, max_token_len_per_gpu=6),
        r"needs 7 tokens.*ppo_max_token_len_per_gpu",
    ),
}


@pytest.mark.parametrize("case", BATCHES)
def test_error_names_the_cause_and_leaves_nothing_behind(packed: Any, case: str) -> None:
    batch, message = BATCHES[case]
    packed.optimizer_zero_grad()
    with packed.train_mode(), pytest.raises(ValueError, match=message):
        packed.forward_backward_batch(batch, actor_loss())
    assert not any("prefix_grouper" in name for name in batch.keys()), "verl would cut it our way"  # noqa: SIM118
    assert all(p.grad is None for p in packed.module.parameters())


def gradients_of(engine: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, actor_loss())
        return full_gradients(engine.module)


def narrowed(field: torch.Tensor) -> torch.Tensor:
    """The same rows, with a value between every two that belongs to none."""
    wide = [torch.cat([row, row[:1]]) for row in field.unbind()]
    lengths = torch.tensor([len(row) - 1 for row in wide])
    offsets = torch.tensor([0, *(len(row) for row in wide)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(wide), offsets=offsets, lengths=lengths)


def test_fields_with_gaps_between_their_rows_are_read_as_stock_verl_reads_them(packed: Any) -> None:
    batch = make_batch(SAMPLES)
    expected = gradients_of(packed, clone(batch))
    for name in ("input_ids", "position_ids", "responses", "old_log_probs", "advantages", "loss_mask"):
        batch[name] = narrowed(batch[name])
    assert batch["input_ids"].lengths() is not None
    found = gradients_of(packed, batch)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def test_multimodal_rows_are_refused_and_empty_ones_are_not() -> None:
    batch = make_batch(SAMPLES)
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [{}, {}])
    assert len(read_sequences(batch).prompt_lengths) == 2
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [{}, {"pixel_values": torch.ones(1)}])
    with pytest.raises(BatchError, match="multi_modal_inputs"):
        read_sequences(batch)
