"""A batch that packed mode cannot compute stops with its cause and its fix, before anything is computed."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import on_ranks
from tests.support import actor_loss, clone, full_gradients, group, make_engine, save_tiny_model
from verl_pg_plugin.engine.batch import read_sequences
from verl_pg_plugin.engine.ranks import RankError
from verl_pg_plugin.modalities import BatchError
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = group(5, [3, 2], 1)


def emptied(batch: TensorDict) -> TensorDict:
    none = torch.zeros(1, dtype=torch.int64)
    fields = {
        name: torch.nested.nested_tensor_from_jagged(field.values()[:0], none)
        for name, field in batch.items()
        if isinstance(field, torch.Tensor) and field.is_nested
    }
    empty = TensorDict(fields, batch_size=[0])
    tu.assign_non_tensor(empty, use_dynamic_bsz=True, max_token_len_per_gpu=64, global_batch_size=1)
    return empty


def without(name: str) -> Callable[[TensorDict], TensorDict]:
    return lambda batch: batch.exclude(name)


def with_field(name: str, make: Callable[[torch.Tensor], Any]) -> Callable[[TensorDict], TensorDict]:
    def change(batch: TensorDict) -> TensorDict:
        batch[name] = make(batch[name])
        return batch

    return change


def jagged(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def jagged_like(field: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, field.offsets())


BAD = {
    "no_prompts": (without("prompts"), r"no prompts.*use_prefix_grouper=False"),
    "no_responses": (without("responses"), "no responses"),
    "float_ids": (
        with_field("input_ids", lambda field: jagged_like(field, field.values().float())),
        r"must be integers, got torch.float32; use torch.int64",
    ),
    "padded_ids": (
        with_field("input_ids", lambda field: field.to_padded_tensor(0)),
        "left_right_2_no_padding",
    ),
    "mrope_positions": (
        with_field(
            "position_ids",
            lambda field: torch.nested.as_nested_tensor(
                [r.expand(3, -1).T for r in field.unbind()], layout=torch.jagged
            ),
        ),
        "do not count 0, 1, 2",
    ),
    "dense_positions": (
        with_field("position_ids", lambda field: field.to_padded_tensor(0)),
        "position_ids must be jagged like input_ids.*left_right_2_no_padding",
    ),
    "no_sequences": (emptied, "empty on this rank"),
    "shifted_positions": (
        with_field("position_ids", lambda field: jagged_like(field, field.values() + 1)),
        "do not count 0, 1, 2",
    ),
    "other_sequence": (
        with_field("responses", lambda field: jagged(row[1:] for row in field.unbind())),
        r"sequence 0: input_ids has 8 tokens, prompts and responses together 7",
    ),
    "negative_token": (
        with_field("input_ids", lambda field: jagged_like(field, -field.values() - 1)),
        r"token ids must lie in",
    ),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Any:
    return make_engine(save_tiny_model(tmp_path_factory.mktemp("qwen3")), packed=True)


@pytest.mark.parametrize("case", BAD)
def test_error_names_the_cause(packed: Any, case: str) -> None:
    change, message = BAD[case]
    batch = change(make_batch(SAMPLES))
    with packed.train_mode(), pytest.raises(ValueError, match=message):
        packed.forward_backward_batch(batch, actor_loss())


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


def one_against_nine(rank: int, path: str) -> str:
    engine = make_engine(path, packed=True)
    samples = group(5, [3], 1) if rank == 0 else [s for k in range(9) for s in group(5, [3], 10 + k)]
    with engine.train_mode(), pytest.raises((BatchError, RankError)) as caught:
        engine.forward_backward_batch(make_batch(samples, max_token_len_per_gpu=8), actor_loss())
    return str(caught.value)


def test_ranks_with_one_and_nine_sequences_both_say_what_cannot_be_met(tmp_path: Path) -> None:
    for message in on_ranks(2, one_against_nine, save_tiny_model(tmp_path)):
        assert "this rank has 1 sequences and another needs 9 micro-batches" in message


@pytest.mark.parametrize(
    ("sample", "message"),
    [(Sample([1, 2], []), "sequence 2 has an empty response"), (Sample([], [3, 4]), "sequence 2 has an empty prompt")],
)
def test_empty_prompt_or_response(packed: Any, sample: Sample, message: str) -> None:
    batch = make_batch([*SAMPLES, sample])
    with packed.train_mode(), pytest.raises(BatchError, match=message):
        packed.forward_backward_batch(batch, actor_loss())


def test_multimodal_rows_are_refused_and_empty_ones_are_not() -> None:
    batch = make_batch(SAMPLES)
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [{}, {}])
    assert len(read_sequences(batch).prompt_lengths) == 2
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [{}, {"pixel_values": torch.ones(1)}])
    with pytest.raises(BatchError, match="multi_modal_inputs"):
        read_sequences(batch)


def test_sequence_longer_than_the_budget_names_the_override(packed: Any) -> None:
    batch = make_batch(SAMPLES, max_token_len_per_gpu=6)
    with packed.train_mode(), pytest.raises(ValueError, match=r"needs 7 tokens.*ppo_max_token_len_per_gpu"):
        packed.forward_backward_batch(batch, actor_loss())


def test_nothing_is_left_behind_after_an_error(packed: Any) -> None:
    batch = make_batch(SAMPLES).exclude("prompts")
    with packed.train_mode(), pytest.raises(BatchError):
        packed.forward_backward_batch(batch, actor_loss())
    assert not any("prefix_grouper" in name for name in batch.keys()), "verl would cut it our way"  # noqa: SIM118
    assert all(p.grad is None for p in packed.module.parameters())


def test_legacy_left_padded_batch_without_position_ids() -> None:
    """verl's left_right_2_no_padding leaves padded prompts and responses beside the attention mask."""
    ids = [[*s.prompt, *s.response] for s in SAMPLES]
    batch = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor([torch.tensor(row) for row in ids], layout=torch.jagged),
            "prompts": torch.tensor([[0, 0, *s.prompt] for s in SAMPLES]),
            "responses": torch.tensor([[*s.response, *[0] * (4 - len(s.response))] for s in SAMPLES]),
            "attention_mask": torch.tensor(
                [[0, 0, *[1] * 5, *[1] * len(s.response), *[0] * (4 - len(s.response))] for s in SAMPLES]
            ),
        },
        batch_size=2,
    )
    sequences = read_sequences(batch)
    assert sequences.prompt_lengths.tolist() == [5, 5]
    assert np.array_equal(sequences.content.tokens, np.concatenate(ids))
