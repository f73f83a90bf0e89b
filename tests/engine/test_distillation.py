"""verl's distillation losses read the same numbers with shared prefixes as of every sequence alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tensordict import TensorDict
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPActorConfig

from tests.engine.carried_cases import NESTED
from tests.engine.ranks import on_ranks
from tests.engine.test_exactness import CASES, MIXED, PADDED
from tests.support import (
    VOCAB,
    Result,
    assert_same,
    check_exact,
    clone,
    group,
    learned,
    make_engine,
    splitting,
    update,
)
from verl_pg_plugin.modalities.text import BatchError
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

K = 8
BEGINNINGS = CASES["one_response_is_the_beginning_of_another"]
LOSSES = [  # verl refuses k1 as a supervised loss
    *(("k1", True), ("k3", True), ("kl", True)),
    *((mode, False) for mode in ("k3", "k2", "mse", "abs", "low_var_kl", "kl")),
]


def with_teacher(batch: TensorDict, k: int = 1, seed: int = 5) -> TensorDict:
    """The batch with what a teacher said of each sequence, which differs where sequences are equal."""
    rng, offsets = np.random.default_rng(seed), batch["input_ids"].offsets()
    log_probs = torch.tensor(rng.normal(-4.5, 1.0, (int(offsets[-1]), k)), dtype=torch.float32)
    if k > 1:
        log_probs = log_probs.log_softmax(-1) - 0.2
    ids = torch.tensor(np.stack([rng.permutation(VOCAB)[:k] for _ in range(int(offsets[-1]))]), dtype=torch.int32)
    batch["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(log_probs, offsets)
    batch["teacher_ids"] = torch.nested.nested_tensor_from_jagged(ids, offsets)
    return batch


def loss_of(mode: str, policy_gradient: bool, task_rewards: bool) -> Callable:
    of_loss = DistillationLossConfig(
        loss_mode=mode, topk=K, use_policy_gradient=policy_gradient, use_task_rewards=task_rewards
    )
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    return partial(
        distillation_ppo_loss, config=actor, distillation_config=DistillationConfig(distillation_loss=of_loss)
    )


def top_k_batch(samples: list[Sample], only: bool = True, **settings: Any) -> TensorDict:
    settings = {"calculate_entropy": False, "distillation_use_topk": True, "distillation_only": only, **settings}
    return with_teacher(make_batch(samples, **settings), K)


def top_k_alone(path: str, batch: TensorDict, loss: Callable) -> Result:
    """Every sequence alone through the stock model, and verl's loss on its logits and then on all of them at once."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    rows: dict[str, list[torch.Tensor]] = {}
    for i, ids in enumerate(batch["input_ids"].unbind()):
        logits = model(input_ids=ids[None], use_cache=False).logits / batch["temperature"]
        found = loss(student_logits=logits, data=tu.index_select_tensor_dict(batch, [i]))
        found["log_probs"] = logits.log_softmax(-1).gather(-1, ids.roll(-1)[None, :, None]).squeeze(-1)
        for name, values in found.items():
            rows.setdefault(name, []).append(values.squeeze(0))
    return replace(learned(model, rows, batch, loss), outputs={})


@pytest.mark.parametrize("task_rewards", [True, False], ids=["task rewards", "alone"])
@pytest.mark.parametrize(("mode", "policy_gradient"), LOSSES)
def test_single_sample_losses_give_the_gradients_of_the_sequences_alone(
    packed: Any, qwen3: str, mode: str, policy_gradient: bool, task_rewards: bool
) -> None:
    loss = loss_of(mode, policy_gradient, task_rewards)
    batch = with_teacher(make_batch([*MIXED, *BEGINNINGS], calculate_entropy=False, max_token_len_per_gpu=50))
    check_exact(packed, qwen3, batch, loss)


@pytest.mark.parametrize("chunk", [0, 3], ids=["all logits", "logits in chunks"])
@pytest.mark.parametrize("tokens", [1 << 30, 36], ids=["one micro-batch", "several"])
@pytest.mark.parametrize(("policy_gradient", "task_rewards"), [(False, False), (False, True), (True, False)], ids=str)
def test_top_k_gives_the_gradients_and_metrics_of_the_sequences_alone(
    qwen3: str, policy_gradient: bool, task_rewards: bool, tokens: int, chunk: int
) -> None:
    loss, only = loss_of("forward_kl_topk", policy_gradient, task_rewards), not policy_gradient and not task_rewards
    engine = make_engine(qwen3, engine={"logits_chunk_size": chunk})
    batch = top_k_batch([*MIXED, *BEGINNINGS], only, temperature=0.7, max_token_len_per_gpu=tokens)
    found, expected = update(engine, batch, loss), top_k_alone(qwen3, batch, loss)
    assert_same(found, expected)
    if tokens > 100:
        for name in ("student_mass", "teacher_mass", "overlap_ratio", "overlap_token_advantage"):
            name = f"distillation/{name}"
            assert found.metrics[name][0] == pytest.approx(expected.metrics[name])


def test_another_teacher_gives_another_loss_so_the_tests_above_show_something(packed: Any) -> None:
    batch, loss = top_k_batch(MIXED), loss_of("forward_kl_topk", False, False)
    other = with_teacher(clone(batch), K, seed=6)
    assert abs(update(packed, batch, loss).loss - update(packed, other, loss).loss) > 1e-3


OPTIONS: dict[str, dict] = {
    "a prompt that reaches into a response": {},
    "padding": {"engine": {"pad_to_length": True, "pad_to_length_bucket": 40, "logits_chunk_size": 5}},
    "verified": {"engine": {"verify": "every_1"}},
}
LONG_PROMPT = [*range(30), 1, 2, 3, 4, 5, 60, 61, 62]
REACHING = [*NESTED, Sample(LONG_PROMPT, [4, 4]), Sample(LONG_PROMPT, [4, 5]), *group(8, [3, 4], 2)]


@pytest.mark.parametrize("option", OPTIONS)
def test_top_k_of_groups_that_exceed_a_micro_batch(qwen3: str, option: str) -> None:
    batch, loss = top_k_batch(REACHING, max_token_len_per_gpu=44), loss_of("forward_kl_topk", False, False)
    engine = make_engine(qwen3, splits=True, **OPTIONS[option])
    with splitting(engine):
        assert_same(update(engine, batch, loss), top_k_alone(qwen3, batch, loss))


def test_top_k_in_padded_groups(qwen3: str) -> None:
    batch, loss = top_k_batch(MIXED, **PADDED), loss_of("forward_kl_topk", False, False)
    assert_same(update(make_engine(qwen3, padded=True), batch, loss), top_k_alone(qwen3, batch, loss))


def update_under_ulysses(rank: int, path: str) -> list[Result]:
    engine = make_engine(path, splits=True, engine={"ulysses_sequence_parallel_size": 2, "logits_chunk_size": 4})
    results = []
    for samples, only, tokens in ULYSSES:
        batch = top_k_batch(samples, only, max_token_len_per_gpu=tokens)
        results.append(update(engine, batch, loss_of("forward_kl_topk", not only, False)))
    return results


ULYSSES = [(MIXED, True, 1 << 30), (MIXED, False, 20), (REACHING, True, 22)]


def test_top_k_under_ulysses(qwen3: str) -> None:
    for results in on_ranks(2, update_under_ulysses, qwen3):
        for (samples, only, _), found in zip(ULYSSES, results, strict=True):
            batch, loss = top_k_batch(samples, only), loss_of("forward_kl_topk", not only, False)
            assert_same(found, top_k_alone(qwen3, batch, loss))


def test_fused_kernels_are_refused_with_top_k_by_name(qwen3: str) -> None:
    fused = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
    engine = make_engine(qwen3, model=fused)
    batch = with_teacher(make_batch(MIXED, calculate_entropy=False))
    loss = loss_of("k1", True, False)
    update(engine, batch, loss)
    with pytest.raises(BatchError, match=r"forward_kl_topk reads; set .*use_fused_kernels=False"):
        update(engine, top_k_batch(MIXED), loss)
