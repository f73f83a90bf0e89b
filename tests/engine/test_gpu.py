"""The engine on a GPU in bf16: split groups match whole ones, and peak memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.batches import make_batch
from tensordict import TensorDict

from tests.precision import BF16, GPU_SIZES, SMOOTH_LOSS, error_of, pooled
from tests.support import actor_loss, clone, group, make_engine, old_outputs, run_reference, save_tiny_model, update
from verl_pg_plugin.planning.activation_policy import ActivationPolicy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("process_group")]

LOSS = actor_loss(**SMOOTH_LOSS)


def two_groups(budget: int, seed: int = 1) -> TensorDict:
    samples = [*group(300, [60, 33, 90, 5, 71, 64, 20, 48], seed), *group(150, [100, 40, 77, 90], seed + 10)]
    return make_batch(samples, max_token_len_per_gpu=budget)


OPTIONS: dict[str, dict] = {
    "fsdp2": {"engine": BF16},
    "compiled layers": {"engine": {**BF16, "compile_layers": True}},
    "activation offload": {"engine": BF16, "model": {"enable_activation_offload": True}},
    "head in chunks": {"engine": {**BF16, "logits_chunk_size": 16}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_error_of_carried_groups_is_that_of_whole_groups(tmp_path: Path, option: str) -> None:
    path = save_tiny_model(tmp_path, **GPU_SIZES)
    engines = {4096: make_engine(path, **OPTIONS[option]), 480: make_engine(path, splits=True, **OPTIONS[option])}
    by_budget: dict[int, list[dict[str, float]]] = {budget: [] for budget in engines}
    for seed in (1, 2, 3):
        reference = run_reference(path, two_groups(4096, seed), LOSS)
        for budget, engine in engines.items():
            by_budget[budget].append(error_of(engine, two_groups(budget, seed), reference, LOSS))
    expected = pooled(by_budget[4096])
    worse = {name: error / expected[name] for name, error in pooled(by_budget[480]).items()}
    assert max(worse.values()) <= 1.05, worse


@pytest.mark.parametrize(("kind", "strategy"), [("qwen3", "fsdp2"), ("qwen3", "fsdp"), ("qwen3_moe", "fsdp2")])
def test_compiled_updated_log_probs_are_the_old_ones_else_the_first_steps_kl_is_not_0(tmp_path, kind, strategy) -> None:
    experts = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    path = save_tiny_model(tmp_path, kind, **{**GPU_SIZES, "hidden_size": 2560, "intermediate_size": 9728, **experts})
    engine = make_engine(path, strategy=strategy, engine={**BF16, "compile_layers": True})
    old = old_outputs(engine, two_groups(4096))["log_probs"]
    new = update(engine, two_groups(4096), LOSS, return_model_output=True).outputs["log_probs"]
    assert all(map(torch.equal, new, old))


def peak_bytes(engine: Any, batch: TensorDict) -> tuple[float, dict]:
    """Peak of requested bytes in the second of two updates (the allocator rounds its blocks), and its metrics."""
    with engine.train_mode():
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            engine.optimizer_zero_grad()
            metrics = engine.forward_backward_batch(clone(batch), LOSS)["metrics"]
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, metrics


def test_peak_memory_does_not_grow_with_responses_times_vocabulary(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, **{**GPU_SIZES, "vocab_size": 60_000})
    engine = make_engine(path, engine={**BF16, "logits_chunk_size": 256})
    few, many = (peak_bytes(engine, make_batch(group(64, [256] * n, 1)))[0] for n in (4, 32))
    assert many - few < 0.2 * (28 * 256 * 60_000 * 2), "of the logits of 28 more"


def test_peak_memory_does_not_grow_with_the_size_of_a_group(tmp_path: Path, monkeypatch) -> None:
    """Chunks of both groups have the same number of tokens within a few percent."""
    monkeypatch.setattr(ActivationPolicy, "keeps_whole", lambda *_: False)  # the device would hold both groups
    engine = make_engine(save_tiny_model(tmp_path, **GPU_SIZES), engine=BF16)

    def peak(responses: int) -> float:
        size, metrics = peak_bytes(engine, make_batch(group(2048, [64] * responses, 1), max_token_len_per_gpu=4096))
        assert metrics["prefix_grouper/split_groups"] == [1.0]
        return size

    assert peak(512) < 1.05 * peak(256)
