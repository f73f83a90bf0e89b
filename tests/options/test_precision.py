"""Mixed precision on a CPU: as close to float32 as stock verl is, parameter by parameter."""

from contextlib import nullcontext
from functools import cache

import pytest
from tensordict import TensorDict

from tests.precision import PRECISIONS, SMOOTH_LOSS, assert_no_worse, errors
from tests.support import (
    Result,
    actor_loss,
    critic_batch,
    critic_loss,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
    splitting,
)
from verl_pg_plugin.synthetic import make_batch

SAMPLES = [*group(120, [60, 33, 70, 5, 71], 1), *group(50, [40, 77], 2), *group(40, [64], 3)]
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256}
WHOLE, SPLIT = 400, 240
"""Tokens of a micro-batch."""
WAYS: dict[str, tuple[bool, dict, int]] = {
    "whole head": (False, {"logits_chunk_size": 0}, WHOLE),
    "head in chunks": (False, {"logits_chunk_size": 16}, WHOLE),
    "split groups": (False, {}, SPLIT),
    "split groups of a critic": (True, {}, SPLIT),
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), initializer_range=0.05, **SIZES)


def batch_of(critic: bool, tokens: int) -> TensorDict:
    return (critic_batch if critic else make_batch)(SAMPLES, max_token_len_per_gpu=tokens)


@cache
def references(path: str, dtype: str, critic: bool) -> tuple[Result, dict[str, float]]:
    """Every sequence alone in float32, and the errors of stock rmpad."""
    batch, loss = batch_of(critic, WHOLE), critic_loss() if critic else actor_loss(**SMOOTH_LOSS)
    reference = run_reference(path, batch, loss)
    stock = make_engine(path, packed=False, critic=critic, engine=PRECISIONS[dtype])
    return reference, errors(run_engine(stock, batch, loss), reference)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_error_is_at_most_that_of_stock_rmpad(qwen3: str, value_model: str, dtype: str, way: str) -> None:
    critic, options, tokens = WAYS[way]
    path, loss = (value_model, critic_loss()) if critic else (qwen3, actor_loss(**SMOOTH_LOSS))
    engine = make_engine(path, critic=critic, splits=tokens == SPLIT, engine={**PRECISIONS[dtype], **options})
    with splitting(engine) if tokens == SPLIT else nullcontext():
        result = run_engine(engine, batch_of(critic, tokens), loss)
    reference, baseline = references(path, dtype, critic)
    assert_no_worse(errors(result, reference), baseline)
