"""Carried groups on a GPU: rounding no worse than that of the whole group."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.engine.carried_cases import carrying_engine
from tests.engine.test_gpu import BF16, SIZES
from tests.precision import SMOOTH_LOSS, errors, pooled
from tests.support import actor_loss, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("process_group"),
]

FACTOR = 1.05
LOSS = SMOOTH_LOSS
OPTIONS: dict[str, dict] = {
    "fsdp2": {"engine": BF16},
    "compiled layers": {"engine": {**BF16, "compile_layers": True}},
    "activation offload": {"engine": BF16, "model": {"enable_activation_offload": True}},
    "head in chunks": {"engine": {**BF16, "logits_chunk_size": 16}},
}


def batch_of(seed: int, budget: int) -> TensorDict:
    samples = [*group(300, [60, 33, 90, 5, 71, 64, 20, 48], seed), *group(150, [100, 40, 77, 90], seed + 10)]
    return make_batch(samples, max_token_len_per_gpu=budget)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), initializer_range=0.05, **SIZES)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_error_of_carried_groups_is_that_of_whole_groups(qwen3: str, option: str) -> None:
    whole = make_engine(qwen3, packed=True, **OPTIONS[option])
    carried = carrying_engine(qwen3, **OPTIONS[option])
    found: dict[str, list[dict[str, float]]] = {"whole": [], "carried": []}
    for seed in (1, 2, 3):
        reference = run_reference(qwen3, batch_of(seed, 4096), actor_loss(**LOSS))
        found["whole"].append(errors(run_engine(whole, batch_of(seed, 4096), actor_loss(**LOSS)), reference))
        found["carried"].append(errors(run_engine(carried, batch_of(seed, 480), actor_loss(**LOSS)), reference))
    expected = pooled(found["whole"])
    worse = {name: error / expected[name] for name, error in pooled(found["carried"]).items()}
    assert max(worse.values()) <= FACTOR, worse


def test_peak_memory_does_not_grow_with_the_size_of_a_group(tmp_path: Path) -> None:
    """Of what is asked for: the allocator's blocks are rounded, and larger ones are handed out where they are free.

    Responses are short, so that chunks of both groups have as many tokens within a few percent.
    """
    path = save_tiny_model(tmp_path, **SIZES)
    engine = make_engine(path, packed=True, engine=BF16)

    def peak(responses: int) -> float:
        with engine.train_mode():
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_stats()["requested_bytes.all.current"]
                engine.optimizer_zero_grad()
                metrics = engine.forward_backward_batch(
                    make_batch(group(2048, [64] * responses, 1), max_token_len_per_gpu=4096), actor_loss(**LOSS)
                )["metrics"]
        assert metrics["prefix_grouper/chains"] == [1.0]
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    assert peak(256) < 1.1 * peak(64)
