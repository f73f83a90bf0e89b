"""The padded prefix_grouper mode gives the log-probs, entropies and gradients of every sequence computed alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.engine.test_exactness import CASES, MIXED, ONE_HEAD, assert_siblings_are_alone
from tests.support import actor_loss, check_exact, group, make_engine, save_tiny_model
from verl_pg_plugin.modalities import BatchError
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

FIXED = {"use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 64}


def padded_engine(path: str, engine: dict | None = None, model: dict | None = None) -> Any:
    return make_engine(
        path,
        packed=True,
        engine={"use_dynamic_bsz": False, **(engine or {})},
        model={"use_remove_padding": False, **(model or {})},
    )


def batch_of(samples: list[Sample], **settings: Any) -> TensorDict:
    return make_batch(samples, **{**FIXED, **settings})


@pytest.fixture(scope="module")
def engine(qwen3: str, process_group: None) -> Any:
    return padded_engine(qwen3)


@pytest.mark.parametrize("case", CASES)
def test_every_token_and_gradient_equals_the_sequence_alone(engine: Any, qwen3: str, case: str) -> None:
    check_exact(engine, qwen3, batch_of(CASES[case], calculate_sum_pi_squared=True))


@pytest.mark.parametrize(("model_type", "sizes"), [("qwen2", {}), ("llama", {}), ("mistral", {"sliding_window": 6})])
def test_other_architectures_and_a_window_shorter_than_the_prompt(model_type: str, sizes: dict, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, model_type, **sizes)
    check_exact(padded_engine(path), path, batch_of(MIXED))


@pytest.mark.parametrize("micro_batch_size", [1, 4, 5])
def test_micro_batch_size_changes_neither_order_nor_gradient_scale(
    engine: Any, qwen3: str, micro_batch_size: int
) -> None:
    check_exact(engine, qwen3, batch_of(MIXED, micro_batch_size_per_gpu=micro_batch_size))


def test_temperature_of_each_sample_within_one_group(engine: Any, qwen3: str) -> None:
    batch = batch_of(MIXED)
    batch["temperature"] = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.9, 0.9, 1.3])
    check_exact(engine, qwen3, batch)


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"engine": {"logits_chunk_size": 3}}, MIXED),
        ({"engine": {"logits_chunk_size": 3}}, MIXED[:4]),
        ({"engine": {"entropy_checkpointing": True}}, MIXED),
        ({"model": {"enable_gradient_checkpointing": False}, "engine": {"reshard_after_forward": False}}, MIXED),
    ],
    ids=["chunks_of_several_groups", "chunks_of_one_group", "entropy_checkpointing", "no_checkpointing, no_reshard"],
)
def test_engine_options_keep_the_numbers(qwen3: str, options: dict, samples: list[Sample]) -> None:
    check_exact(padded_engine(qwen3, **options), qwen3, batch_of(samples))


def test_more_than_4096_tokens(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, **ONE_HEAD)
    check_exact(padded_engine(path), path, batch_of(group(4200, [6, 9], 4)))


def test_sibling_responses_never_see_each_other(engine: Any) -> None:
    assert_siblings_are_alone(engine, **FIXED)


def test_metrics_count_padding_as_work(engine: Any) -> None:
    with engine.train_mode():
        metrics = engine.forward_backward_batch(batch_of(MIXED), actor_loss())["metrics"]
    longest_line = 19 + 5 + 9 + 1 + 7
    assert metrics["prefix_grouper/physical_tokens"] == [3 * longest_line]
    assert metrics["prefix_grouper/groups_per_micro_batch"] == [3]


def test_dynamic_micro_batches_are_refused_with_both_ways_out(engine: Any) -> None:
    batch = batch_of(MIXED, use_dynamic_bsz=True, max_token_len_per_gpu=100)
    with engine.train_mode(), pytest.raises(BatchError, match=r"use_remove_padding=True.*use_dynamic_bsz=False"):
        engine.forward_backward_batch(batch, actor_loss())
