"""Mixed precision on a CPU: as close to float32 as stock verl is, parameter by parameter."""

from functools import cache

import pytest

from tests.precision import BF16, PRECISIONS, SMOOTH_LOSS, assert_no_worse, errors
from tests.support import (
    Result,
    actor_loss,
    critic_batch,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
    splitting,
)
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [*group(120, [60, 33, 70, 5, 71], 1), *group(50, [40, 77], 2), *group(40, [64], 3)]
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), initializer_range=0.05, **SIZES)


@cache
def references(path: str, dtype: str) -> tuple[Result, dict[str, float]]:
    """Every sequence alone in float32, and the errors of stock rmpad."""
    batch, loss = make_batch(SAMPLES, max_token_len_per_gpu=400), actor_loss(**SMOOTH_LOSS)
    reference = run_reference(path, batch, loss)
    stock = make_engine(path, packed=False, engine=PRECISIONS[dtype])
    return reference, errors(run_engine(stock, batch, loss), reference)


@pytest.mark.parametrize("way", ["whole head", "head in chunks", "carried groups"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_error_is_at_most_that_of_stock_rmpad(qwen3: str, dtype: str, way: str) -> None:
    mixed, (reference, baseline), loss = PRECISIONS[dtype], references(qwen3, dtype), actor_loss(**SMOOTH_LOSS)
    if way == "carried groups":
        with splitting(engine := make_engine(qwen3, splits=True, engine=mixed)):
            result = run_engine(engine, make_batch(SAMPLES, max_token_len_per_gpu=240), loss)
    else:
        chunk = {"logits_chunk_size": 16 if way == "head in chunks" else 0}
        result = run_engine(
            make_engine(qwen3, engine={**mixed, **chunk}),
            make_batch(SAMPLES, max_token_len_per_gpu=400),
            loss,
        )
    assert_no_worse(errors(result, reference), baseline)


def test_a_critic_that_carries_in_bf16_is_no_worse_than_stock_rmpad(value_model: str) -> None:
    batch = critic_batch(SAMPLES, max_token_len_per_gpu=400)
    reference = run_reference(value_model, batch)
    baseline = errors(run_engine(make_engine(value_model, packed=False, engine=BF16, critic=True), batch), reference)
    engine = make_engine(value_model, engine=BF16, critic=True, splits=True)
    with splitting(engine):
        result = run_engine(engine, critic_batch(SAMPLES, max_token_len_per_gpu=240))
    assert_no_worse(errors(result, reference), baseline)
