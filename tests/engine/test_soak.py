"""Two hundred updates of ragged random batches on two processes, every mode in turn, leave nothing behind."""

import gc
import statistics
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict

from tests.engine.ranks import on_ranks
from tests.engine.test_verify import random_samples
from tests.support import actor_loss, clone, infer, make_engine, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

WARM_UP = 30
"""Updates after which nothing may grow: by then every mode has run a few batches, and what is cached is."""
MODES: dict[str, dict[str, Any]] = {
    "packed": {"splits": True},
    "packed, verified": {"engine": {"verify": "every_1"}},
    "packed, head in chunks": {"engine": {"logits_chunk_size": 64}},
    "packed, never carried": {"engine": {"carry": "never"}},
    "packed, attention recomputed": {"engine": {"activations": "inputs"}},
    "packed, Ulysses": {"engine": {"ulysses_sequence_parallel_size": 2}},
    "padded groups": {"padded": True},
    "stock": {"packed": False},
}
ALLOWED = {"resident_mib": 8.0, "tensors": 8, "descriptors": 0}
"""What of each may be more at the end than after the warm-up. Resident memory is the allocator's."""


def batch_of(update: int, rank: int, name: str) -> TensorDict:
    """Ranks that share each sequence have one batch; a micro-batch has room for the longest sequence."""
    by_rank = [(random_samples(2 * update + r) * 5)[:15] for r in range(2)]  # as many on both
    if name == "padded groups":
        cut = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 6 + update % 4}
        return make_batch(by_rank[rank], update, use_remove_padding=False, **cut)
    longest = max(len(sample.prompt) + len(sample.response) for mine in by_rank for sample in mine)
    return make_batch(by_rank["Ulysses" not in name and rank], update, max_token_len_per_gpu=longest)


def soak(rank: int, path: str) -> list[dict[str, float]]:
    """What this process holds after every update, garbage collected."""
    engines = {name: make_engine(path, **settings) for name, settings in MODES.items()}
    held_after, process = [], psutil.Process()
    for update in range(200):
        name = list(MODES)[update % len(MODES)]
        batch = batch_of(update, rank, name)
        infer(engines[name], batch)
        with engines[name].train_mode():
            engines[name].train_batch(clone(batch), actor_loss())
        gc.collect()
        held = {
            "resident_mib": process.memory_info().rss / 2**20,
            "tensors": sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
            "descriptors": process.num_fds(),
        }
        held_after.append(held)
    return held_after


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_grows_in_200_updates(tmp_path: Path) -> None:
    for held_after in on_ranks(2, soak, save_tiny_model(tmp_path)):
        first, last = held_after[WARM_UP : WARM_UP + 24], held_after[-24:]
        for name, allowed in ALLOWED.items():
            early, late = (statistics.median(after[name] for after in some) for some in (first, last))
            assert late - early <= allowed, name
