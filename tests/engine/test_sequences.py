"""What the layout is told about a batch: which sequences may share rows, and where each response starts."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.support import group
from verl_pg_plugin.engine.batch import read_sequences
from verl_pg_plugin.synthetic import make_batch

SAMPLES = group(5, [3, 2, 4], 1)


def with_temperature(values: list[float]) -> torch.Tensor:
    return make_batch(SAMPLES, temperature=1.0).set("temperature", torch.tensor(values).expand(3))


def test_temperatures_that_differ_in_the_last_bit_share_no_row() -> None:
    """A row's log-prob depends on it: the nearest two numbers are as far apart as any."""
    next_to_it = torch.nextafter(torch.tensor(0.7), torch.tensor(1.0)).item()
    sequences = read_sequences(with_temperature([0.7, next_to_it, 0.7]))
    assert sequences.classes is not None
    assert sequences.classes.tolist() == [0, 1, 0]
    assert sequences.select([1, 2]).classes.tolist() == [1, 0]
    layout = sequences.lay_out(packed=True)
    assert layout.num_tokens == 2 * 4 + sum(len(sample.response) for sample in SAMPLES)
    assert (layout.segment_start == 0).sum() == 2


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_temperature_of_one_element_is_everybodys(shape: tuple[int, ...]) -> None:
    batch = make_batch(SAMPLES, temperature=torch.full(shape, 0.7))
    assert isinstance(batch["temperature"], torch.Tensor)
    sequences = read_sequences(batch)
    assert sequences.classes is None
    assert sequences.order().num_shared.tolist() == [0, 4, 4]


def test_legacy_left_padded_batch_without_position_ids() -> None:
    """verl's left_right_2_no_padding leaves padded prompts and responses beside the attention mask."""
    ids = [[*s.prompt, *s.response] for s in SAMPLES]
    padding = [[0] * (4 - len(s.response)) for s in SAMPLES]
    fields = {
        "input_ids": torch.nested.as_nested_tensor([torch.tensor(row) for row in ids], layout=torch.jagged),
        "prompts": torch.tensor([[0, 0, *s.prompt] for s in SAMPLES]),
        "responses": torch.tensor([[*s.response, *zeros] for s, zeros in zip(SAMPLES, padding, strict=True)]),
        "attention_mask": torch.tensor(
            [[0, 0, *[1] * len(row), *zeros] for row, zeros in zip(ids, padding, strict=True)]
        ),
    }
    sequences = read_sequences(TensorDict(fields, batch_size=len(SAMPLES)))
    assert sequences.prompt_lengths.tolist() == [5] * len(SAMPLES)
    assert np.array_equal(sequences.content.tokens, np.concatenate(ids))
