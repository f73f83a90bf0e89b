"""A batch that packed mode cannot compute stops with its cause and its fix, before anything is computed."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support import actor_loss, group, make_engine, save_tiny_model
from verl_pg_plugin.engine.batch.sequences import BatchError, read_sequences
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = group(5, [3, 2], 1)


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
    "shifted_positions": (
        with_field("position_ids", lambda field: jagged_like(field, field.values() + 1)),
        "do not count 0, 1, 2",
    ),
    "other_sequence": (
        with_field("responses", lambda field: jagged(row[1:] for row in field.unbind())),
        r"row 0: input_ids has 8 tokens, prompts and responses together 7",
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


@pytest.mark.parametrize(
    ("sample", "message"),
    [(Sample([1, 2], []), "row 2 has an empty response"), (Sample([], [3, 4]), "row 2 has an empty prompt")],
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
    assert packed.carrier is None
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
    assert np.array_equal(sequences.tokens, np.concatenate(ids))
