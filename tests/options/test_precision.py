"""Mixed precision on a CPU: errors against float32 of each parameter are at most stock verl's."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from benchmarks.batches import make_batch

from tests.precision import PRECISIONS, SMOOTH_LOSS, assert_no_worse, error_of
from tests.support import actor_loss, critic_batch, group, make_engine, run_reference, save_tiny_model, splitting

SAMPLES = [*group(120, [60, 33, 70, 5, 71], 1), *group(50, [40, 77], 2), *group(40, [64], 3)]
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256}
WHOLE, SPLIT = 400, 240
"""Tokens of a micro-batch."""
WAYS: dict[tuple[str, str], list[tuple[dict, int]]] = {
    ("bf16", "actor"): [({"logits_chunk_size": 0}, WHOLE), ({"logits_chunk_size": 16}, WHOLE), ({}, SPLIT)],
    ("fp16", "actor"): [({"logits_chunk_size": 16}, SPLIT)],
    ("bf16", "critic"): [({}, SPLIT)],
    ("fp16", "critic"): [({}, SPLIT)],
}


@pytest.mark.parametrize(("dtype", "model"), WAYS)
def test_error_is_at_most_that_of_stock_rmpad(tmp_path: Path, value_model: str, dtype: str, model: str) -> None:
    """With a whole head, a head in chunks, and split groups."""
    critic = model == "critic"
    make = critic_batch if critic else make_batch
    path = value_model if critic else save_tiny_model(tmp_path, initializer_range=0.05, **SIZES)
    loss = None if critic else actor_loss(**SMOOTH_LOSS)
    batch = make(SAMPLES, max_token_len_per_gpu=WHOLE)
    reference = run_reference(path, batch, loss)
    stock = make_engine(path, packed=False, critic=critic, engine=PRECISIONS[dtype])
    baseline = error_of(stock, batch, reference, loss)
    for options, tokens in WAYS[dtype, model]:
        engine = make_engine(path, critic=critic, splits=tokens == SPLIT, engine={**PRECISIONS[dtype], **options})
        with splitting(engine) if tokens == SPLIT else nullcontext():
            error = error_of(engine, make(SAMPLES, max_token_len_per_gpu=tokens), reference, loss)
        assert_no_worse(error, baseline)
