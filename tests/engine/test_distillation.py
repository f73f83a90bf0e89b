"""verl's distillation losses with shared prefixes match those of single sequences."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.batches import Sample, make_batch
from tensordict import TensorDict
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPActorConfig

from tests import support
from tests.engine.carried_cases import NESTED
from tests.engine.ranks import on_ranks
from tests.engine.test_exactness import CASES, MIXED, PADDED
from verl_pg_plugin.issue import BatchError

K = 8
BEGINNINGS = CASES["one_response_is_the_beginning_of_another"]
LOSSES = [  # verl refuses k1 as a supervised loss
    *((mode, True, True) for mode in ("k1", "k3", "kl")),
    *((mode, False, True) for mode in ("k3", "k2", "mse", "abs", "low_var_kl", "kl")),
    *(("k1", True, False), ("k3", False, False)),
]


def with_teacher(batch: TensorDict, k: int = 1) -> TensorDict:
    """Add teacher outputs, which differ also between equal sequences."""
    rng, offsets = np.random.default_rng(5), batch["input_ids"].offsets()
    log_probs = torch.tensor(rng.normal(-4.5, 1.0, (int(offsets[-1]), k)), dtype=torch.float32)
    if k > 1:
        log_probs = log_probs.log_softmax(-1) - 0.2
    drawn = np.stack([rng.permutation(support.VOCAB)[:k] for _ in range(int(offsets[-1]))])
    ids = torch.tensor(drawn, dtype=torch.int32)
    batch["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(log_probs, offsets)
    batch["teacher_ids"] = torch.nested.nested_tensor_from_jagged(ids, offsets)
    return batch


def loss_of(mode: str, policy_gradient: bool, task_rewards: bool) -> Callable:
    flags = {"use_policy_gradient": policy_gradient, "use_task_rewards": task_rewards}
    config = DistillationConfig(distillation_loss=DistillationLossConfig(loss_mode=mode, topk=K, **flags))
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    return partial(distillation_ppo_loss, config=actor, distillation_config=config)


def top_k_batch(samples: list[Sample], only: bool = True, **settings: Any) -> TensorDict:
    settings = {"calculate_entropy": False, "distillation_use_topk": True, "distillation_only": only, **settings}
    return with_teacher(make_batch(samples, **settings), K)


@pytest.mark.parametrize(("mode", "policy_gradient", "task_rewards"), LOSSES)
def test_single_sample_losses_match_single_sequences(
    packed: Any, qwen3: str, mode: str, policy_gradient: bool, task_rewards: bool
) -> None:
    batch = with_teacher(make_batch([*MIXED, *BEGINNINGS], calculate_entropy=False, max_token_len_per_gpu=50))
    support.check_exact(packed, qwen3, batch, loss_of(mode, policy_gradient, task_rewards))


def test_a_filler_sequence_never_fills_a_micro_batch_alone(packed: Any, qwen3: str) -> None:
    """verl's losses fail on such a micro-batch."""
    loss, samples = loss_of("k3", False, False), [*support.group(60, [6, 5, 7, 6], 1), Sample([2] * 9, [3], mask=[0])]
    batch = with_teacher(make_batch(samples, calculate_entropy=False, max_token_len_per_gpu=84))
    support.check_exact(packed, qwen3, batch, loss)
    batch["loss_mask"] = batch["response_mask"] + (batch["response_mask"] == 0)  # V1 keeps it for rejected samples
    support.check_exact(packed, qwen3, batch, loss)
    with pytest.raises(BatchError, match=r"force_group_size=2 keeps neighbours together"):
        support.update(packed, with_teacher(make_batch(samples, force_group_size=2)), loss)


LONG_PROMPT = [*range(30), 1, 2, 3, 4, 5, 60, 61, 62]
REACHING = [*NESTED, Sample(LONG_PROMPT, [4, 4]), Sample(LONG_PROMPT, [4, 5]), *support.group(8, [3, 4], 2)]
"""Groups above 44 tokens, and a prompt that continues into a response."""
WHOLE, SEVERAL, EXCEEDED = ({"temperature": 0.7, "max_token_len_per_gpu": tokens} for tokens in (1 << 30, 36, 44))
WAYS: dict[str, tuple[list[Sample], dict, dict]] = {
    "whole": ([*MIXED, *BEGINNINGS], WHOLE, {}),
    "several": ([*MIXED, *BEGINNINGS], SEVERAL, {}),
    "several, logits in chunks": ([*MIXED, *BEGINNINGS], SEVERAL, {"engine": {"logits_chunk_size": 3}}),
    "padded groups": (MIXED, PADDED, {"padded": True}),
    "split": (REACHING, EXCEEDED, {"splits": True}),
    "split, verified": (REACHING, EXCEEDED, {"splits": True, "engine": {"verify": "every_1"}}),
    "split, padded": (
        REACHING,
        EXCEEDED,
        {"splits": True, "engine": {"pad_to_length": True, "pad_to_length_bucket": 40, "logits_chunk_size": 5}},
    ),
}
"""Samples, micro-batch settings, and arguments of ``make_engine``."""


def check_top_k(engine: Any, path: str, batch: TensorDict, loss: Callable) -> None:
    result = support.update(engine, batch, loss, return_model_output=True)
    expected = support.run_reference(path, batch, loss, of_logits=loss)
    support.assert_same(result, expected)
    if len(result.metrics["distillation/student_mass"]) == 1:  # else these are means of micro-batches
        for name in ("student_mass", "teacher_mass", "overlap_ratio", "overlap_token_advantage"):
            name = f"distillation/{name}"
            assert result.metrics[name][0] == pytest.approx(expected.metrics[name])


@pytest.mark.parametrize(
    ("way", "policy_gradient", "task_rewards"),
    [
        *((way, False, False) for way in WAYS),
        *((way, *terms) for way in ("whole", "several, logits in chunks") for terms in ((False, True), (True, False))),
    ],
)
def test_top_k_gradients_and_metrics_match_single_sequences(
    qwen3: str, way: str, policy_gradient: bool, task_rewards: bool
) -> None:
    samples, cut, options = WAYS[way]
    engine, loss = support.make_engine(qwen3, **options), loss_of("forward_kl_topk", policy_gradient, task_rewards)
    batch = top_k_batch(samples, not policy_gradient and not task_rewards, **cut)
    with support.splitting(engine) if "split" in way else nullcontext():
        check_top_k(engine, qwen3, batch, loss)


def check_under_ulysses(rank: int, path: str) -> None:
    options = {"ulysses_sequence_parallel_size": 2, "logits_chunk_size": 4}
    engine = support.make_engine(path, splits=True, engine=options)
    for samples, only, tokens in ((MIXED, True, 1 << 30), (MIXED, False, 20), (REACHING, True, 22)):
        batch = top_k_batch(samples, only, max_token_len_per_gpu=tokens)
        check_top_k(engine, path, batch, loss_of("forward_kl_topk", not only, False))


def test_top_k_distillation_is_exact_under_ulysses(qwen3: str) -> None:
    on_ranks(2, check_under_ulysses, qwen3)


def test_fused_kernels_are_refused_with_top_k(qwen3: str) -> None:
    engine = support.make_engine(qwen3, model=support.FUSED_HEAD)
    batch = with_teacher(make_batch(MIXED, calculate_entropy=False))
    support.update(engine, batch, loss := loss_of("k1", True, False))
    with pytest.raises(BatchError, match=r"forward_kl_topk reads\. Fix: set .*use_fused_kernels=False"):
        support.update(engine, top_k_batch(MIXED), loss)
