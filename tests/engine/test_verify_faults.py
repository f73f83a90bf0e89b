"""Verify mode lets clean runs pass and stops when shared prefixes give other numbers."""

from pathlib import Path

import pytest
import torch

from tests.engine.ranks import on_ranks
from tests.engine.verifying import (
    ALWAYS,
    FAULTS,
    PRECISIONS,
    SAMPLES,
    break_layouts,
    infer,
    random_samples,
    update,
    wrong_kv_row,
)
from tests.support import group, make_engine, save_tiny_model
from verl_pg_plugin.engine.verify import MismatchError
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_random_groups_pass_whatever_the_scale_of_the_weights(tmp_path: Path, precision: str, scale: float) -> None:
    path = save_tiny_model(tmp_path, initializer_range=scale)
    engine = make_engine(path, packed=True, engine={**ALWAYS, **PRECISIONS[precision]})
    verified = 0
    for seed in range(6):
        batch = make_batch(random_samples(seed), calculate_sum_pi_squared=True)
        verified += infer(engine, batch)["prefix_grouper/verified_rows"][0]
    verified += update(engine, batch)["prefix_grouper/verified_rows"][0]
    assert verified >= 12


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_layout_is_caught(qwen3: str, precision: str, fault: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first", **PRECISIONS[precision]})
    break_layouts(engine, FAULTS[fault])
    with pytest.raises(MismatchError, match="log_probs"):
        infer(engine, make_batch(SAMPLES, calculate_entropy=False))


def verify_under_ulysses(rank: int, path: str) -> tuple[list[float], list[float], str]:
    """Rows and largest errors of a clean run, and the message of a fault, where two ranks share each sequence."""
    options = {**ALWAYS, "ulysses_sequence_parallel_size": 2}
    engine, batch = make_engine(path, packed=True, engine=options), make_batch(SAMPLES, max_token_len_per_gpu=60)
    metrics = [step(engine, batch) for step in (infer, update)]
    rows, errors = (
        [of_step[f"prefix_grouper/{name}"][0] for of_step in metrics] for name in ("verified_rows", "verify_max_error")
    )
    with pytest.raises(MismatchError) as caught:
        infer(break_layouts(engine, wrong_kv_row), batch)
    return rows, errors, str(caught.value)


def test_ranks_that_share_sequences_verify_them_together(qwen3: str) -> None:
    (rows, errors, message), second = on_ranks(2, verify_under_ulysses, qwen3)
    assert rows == [4.0] * 2, "two of each of two micro-batches, though two ranks compare them"
    assert max(errors) < 1e-5
    assert "log_probs of response token" in message
    assert "rank 1:" not in message
    assert second == (rows, errors, message), "or one rank stops and the other waits for it"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_bf16_on_a_gpu_passes_clean_and_fails_broken(tmp_path: Path, fault: str | None) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 64}
    path = save_tiny_model(tmp_path, **sizes, num_attention_heads=8, vocab_size=8000, initializer_range=0.05)
    engine = make_engine(path, packed=True, engine={**ALWAYS, **PRECISIONS["bf16"]})
    if fault is None:
        for seed in range(20):
            infer(engine, make_batch([*group(700, [300, 40, 512, 129], seed), *random_samples(seed)]))
        return
    break_layouts(engine, FAULTS[fault])
    with pytest.raises(MismatchError):
        infer(engine, make_batch(group(60, [90, 40, 112, 64], 1)))
