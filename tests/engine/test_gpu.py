"""The engine on a GPU in bf16: as close to float32 as stock verl is, parameter by parameter."""

from pathlib import Path

import pytest
import torch
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.precision import PRECISIONS, SMOOTH_LOSS, assert_no_worse, errors
from tests.support import actor_loss, clone, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("process_group"),
]

BF16 = PRECISIONS["bf16"]
SAMPLES = [*group(300, [60, 33, 90, 5, 71, 64, 20, 48], 1), *group(150, [100, 40, 77, 90], 2), *group(90, [64], 3)]
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), initializer_range=0.05, **SIZES)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
@pytest.mark.parametrize("chunk", [0, 16], ids=["whole head", "head in chunks"])
def test_bf16_error_is_at_most_that_of_stock_rmpad(qwen3: str, strategy: str, chunk: int) -> None:
    flash = {"override_config": {"attn_implementation": "flash_attention_2"}}
    batch = make_batch(SAMPLES, max_token_len_per_gpu=1200)
    reference = run_reference(qwen3, batch, actor_loss(**SMOOTH_LOSS))
    stock = make_engine(
        qwen3, packed=False, strategy=strategy, engine=BF16, model=flash, engine_cls=FSDPEngineWithLMHead
    )
    baseline = errors(run_engine(stock, batch, actor_loss(**SMOOTH_LOSS)), reference)
    packed = make_engine(
        qwen3, packed=True, strategy=strategy, engine={**BF16, "logits_chunk_size": chunk}, model=flash
    )
    result = errors(run_engine(packed, batch, actor_loss(**SMOOTH_LOSS)), reference)
    assert_no_worse(result, baseline)


def test_peak_memory_does_not_grow_with_responses_times_vocabulary(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, **SIZES, vocab_size=60_000)
    engine = make_engine(path, packed=True, engine={**BF16, "logits_chunk_size": 256})

    def peak(responses: int) -> float:
        batch = make_batch(group(64, [256] * responses, 1))
        with engine.train_mode():
            engine.forward_backward_batch(clone(batch), actor_loss(**SMOOTH_LOSS))
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            engine.forward_backward_batch(clone(batch), actor_loss(**SMOOTH_LOSS))
        return torch.cuda.max_memory_allocated() - before

    logits_of_28_more = 28 * 256 * 60_000 * 2
    assert peak(32) - peak(4) < 0.2 * logits_of_28_more
