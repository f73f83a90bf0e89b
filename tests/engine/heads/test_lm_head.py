"""What a job computes from logits, and that it is done once."""

from dataclasses import replace

import pytest
import torch
from verl.utils import torch_functional as verl_F

from verl_pg_plugin.engine.heads.chunked_head import ChunkedHead
from verl_pg_plugin.engine.heads.lm_head import HeadJob

LOGITS = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
JOB = HeadJob(torch.arange(6), 1.0, False, False, verl_F.entropy_from_logits)


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, labels[:, None])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_one_temperature_divides_all_logits(temperature: float) -> None:
    found = replace(JOB, temperature=temperature).outputs(LOGITS)
    torch.testing.assert_close(found, log_probs(LOGITS / temperature, JOB.labels))


def test_a_chunk_takes_the_temperatures_and_labels_of_its_own_rows() -> None:
    temperature = torch.linspace(0.5, 2.0, 6)
    job, rows = replace(JOB, temperature=temperature), slice(2, 5)
    expected = log_probs(LOGITS[rows] / temperature[rows].double()[:, None], JOB.labels[rows])
    torch.testing.assert_close(job.outputs(LOGITS[rows], rows), expected)
    torch.testing.assert_close(job.outputs(LOGITS)[rows], expected)


def test_outputs_of_bf16_logits_are_float32() -> None:
    job = replace(JOB, with_entropy=True, with_sum_pi_squared=True)
    outputs = job.outputs(LOGITS.bfloat16())
    assert outputs.dtype == torch.float32
    assert outputs.shape == (6, len(job.names))


def test_a_job_is_done_in_one_forward_and_the_next_has_logits() -> None:
    head = torch.nn.Linear(4, 11)
    chunked = ChunkedHead(head, chunk_size=2)
    assert chunked.takes(JOB)
    hidden = torch.randn(1, 6, 4)
    assert head(hidden).shape == (1, 6, 1)
    assert head(hidden).shape == (1, 6, 11)
