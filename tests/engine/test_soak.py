"""Updates of ragged random batches leak no tensor, in any mode."""

import gc
from typing import Any

import pytest
import torch
from benchmarks.batches import make_batch

from tests.engine.test_exactness import PADDED
from tests.engine.test_verify import random_samples
from tests.support import actor_loss, infer, make_engine

MODES: dict[str, dict[str, Any]] = {
    "packed": {"splits": True},
    "packed, verified, head in chunks": {"engine": {"verify": "every_1", "logits_chunk_size": 64}},
    "packed, no prefix cache, attention recomputed": {"engine": {"prefix_cache": "off", "activations": "inputs"}},
    "padded groups": {"padded": True},
}
QUICK, *OTHERS = MODES


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_updates_leak_no_tensor(qwen3: str, name: str) -> None:
    engine, held = make_engine(qwen3, **MODES[name]), []
    for seed in range(4):
        samples = random_samples(seed)
        longest = max(len(sample.prompt) + len(sample.response) for sample in samples)
        batch = make_batch(samples, **(PADDED if name == "padded groups" else {"max_token_len_per_gpu": longest}))
        infer(engine, batch)
        with engine.train_mode():
            engine.train_batch(batch, actor_loss())
        del batch
        gc.collect()
        held.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    assert held[-1] <= held[2], held  # caches are full by then
