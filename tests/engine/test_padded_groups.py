"""The padded prefix_grouper mode gives the log-probs, entropies and gradients of every sequence computed alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.engine.test_exactness import CASES, MIXED
from tests.support import (
    ARCHITECTURES,
    actor_loss,
    assert_same,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin.layout import build_padded_layout
from verl_pg_plugin.modalities import BatchError
from verl_pg_plugin.planning.cost import num_pairs
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
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def engine(qwen3: str, process_group: None) -> Any:
    return padded_engine(qwen3)


@pytest.mark.parametrize("case", CASES)
def test_every_token_and_gradient_equals_the_sequence_alone(engine: Any, qwen3: str, case: str) -> None:
    batch = batch_of(CASES[case], calculate_sum_pi_squared=True)
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_architectures_need_no_patched_model_file(model_type: str, tmp_path: Path) -> None:
    path, batch = save_tiny_model(tmp_path, model_type), batch_of(MIXED)
    assert_same(run_engine(padded_engine(path), batch, actor_loss()), run_reference(path, batch, actor_loss()))


def test_sliding_window_shorter_than_the_prompt(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "mistral", sliding_window=6)
    batch = batch_of(MIXED)
    assert_same(run_engine(padded_engine(path), batch, actor_loss()), run_reference(path, batch, actor_loss()))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 5])
def test_micro_batch_size_changes_neither_order_nor_gradient_scale(
    engine: Any, qwen3: str, micro_batch_size: int
) -> None:
    batch = batch_of(MIXED, micro_batch_size_per_gpu=micro_batch_size)
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


def test_temperature_of_each_sample_within_one_group(engine: Any, qwen3: str) -> None:
    batch = batch_of(MIXED)
    batch["temperature"] = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.9, 0.9, 1.3])
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"engine": {"logits_chunk_size": 3}}, MIXED),
        ({"engine": {"logits_chunk_size": 3}}, MIXED[:4]),
        ({"engine": {"entropy_checkpointing": True}}, MIXED),
        ({"model": {"enable_gradient_checkpointing": False}}, MIXED),
        ({"engine": {"strategy": "fsdp2", "reshard_after_forward": False}}, MIXED),
    ],
    ids=["chunks_of_several_groups", "chunks_of_one_group", "entropy_checkpointing", "no_checkpointing", "no_reshard"],
)
def test_engine_options_keep_the_numbers(qwen3: str, options: dict, samples: list[Sample]) -> None:
    batch = batch_of(samples)
    assert_same(
        run_engine(padded_engine(qwen3, **options), batch, actor_loss()), run_reference(qwen3, batch, actor_loss())
    )


def test_more_than_4096_tokens(engine: Any, qwen3: str) -> None:
    batch = batch_of(group(4200, [6, 9], 4))
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


def test_sibling_responses_never_see_each_other(engine: Any) -> None:
    samples = group(12, [6, 6, 6], 8)
    changed = [samples[0], Sample(samples[1].prompt, [t ^ 1 for t in samples[1].response]), samples[2]]
    with engine.eval_mode():
        before = engine.infer_batch(batch_of(samples))["model_output"]["log_probs"].unbind()
        after = engine.infer_batch(batch_of(changed))["model_output"]["log_probs"].unbind()
    for row in (0, 2):
        assert torch.equal(before[row], after[row])
    assert not torch.equal(before[1], after[1])


def test_metrics_count_padding_as_work(engine: Any) -> None:
    with engine.train_mode():
        metrics = engine.forward_backward_batch(batch_of(MIXED), actor_loss())["metrics"]
    longest_line = 19 + 5 + 9 + 1 + 7
    assert metrics["prefix_grouper/logical_tokens"] == [sum(len(s.prompt) + len(s.response) for s in MIXED)]
    assert metrics["prefix_grouper/physical_tokens"] == [3 * longest_line]
    assert metrics["prefix_grouper/groups_per_micro_batch"] == [3]
    assert metrics["prefix_grouper/attention_backend/sdpa"] == [1.0]


def test_dynamic_micro_batches_are_refused_with_both_ways_out(engine: Any) -> None:
    batch = batch_of(MIXED, use_dynamic_bsz=True, max_token_len_per_gpu=100)
    with engine.train_mode(), pytest.raises(BatchError, match=r"use_remove_padding=True.*use_dynamic_bsz=False"):
        engine.forward_backward_batch(batch, actor_loss())


def test_layout_of_two_groups_is_the_one_that_upstream_draws() -> None:
    tokens = np.array([1, 2, 3, 10, 11, 7, 20, 1, 2, 3, 12])  # two responses to 1 2 3, one to 7
    layout = build_padded_layout(tokens, np.array([0, 5, 7, 11]), np.array([3, 1, 3]))
    assert layout.group_info == [[2, 2, 1], [0, 1]]
    assert layout.input_ids.tolist() == [[1, 2, 3, 10, 3], [7, 0, 0, 0, 0]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 2], [0, 0, 0, 0, 0]]
    assert layout.labels.reshape(-1)[layout.head_index].tolist() == [10, 11, 12, 20]
    assert layout.head_index.tolist() == [2, 3, 4, 5]
    assert layout.head_sequence.tolist() == [0, 0, 2, 1]
    assert layout.response_index.tolist() == [2, 3, 9, 5]
    assert (layout.num_tokens, layout.num_groups, layout.num_logical_tokens) == (10, 2, 11)
    assert num_pairs(layout) == (1 + 2) + (3 + 4) + 3 + 1
