"""Mixed precision on a CPU: as close to float32 as stock verl is, parameter by parameter."""

import pytest
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.precision import SMOOTH_LOSS, assert_no_worse, errors
from tests.support import actor_loss, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [*group(120, [60, 33, 70, 5, 71], 1), *group(50, [40, 77], 2), *group(40, [64], 3)]
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), initializer_range=0.05, **SIZES)


@pytest.mark.parametrize("chunk", [0, 16], ids=["whole head", "head in chunks"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_error_is_at_most_that_of_stock_rmpad(qwen3: str, dtype: str, chunk: int) -> None:
    mixed = {"mixed_precision": {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    batch, loss = make_batch(SAMPLES, max_token_len_per_gpu=400), actor_loss(**SMOOTH_LOSS)
    reference = run_reference(qwen3, batch, loss)
    stock = make_engine(qwen3, packed=False, engine=mixed, engine_cls=FSDPEngineWithLMHead)
    packed = make_engine(qwen3, packed=True, engine={**mixed, "logits_chunk_size": chunk})
    baseline = errors(run_engine(stock, batch, loss), reference)
    assert_no_worse(errors(run_engine(packed, batch, loss), reference), baseline)
