"""The shipped models under verl's FSDP2 engine, padded and packed, against one sequence at a time."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from tests.support import actor_loss, assert_same, group, make_engine, run_engine, run_reference
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="float32 on the CPU; on a GPU the engine runs on the GPU"),
]

SAMPLES = [
    *group(12, [5, 9, 1], seed=1),
    *group(1, [4, 2], seed=2),
    Sample(range(20, 26), range(5), mask=[1, 1, 0, 0, 1]),
    Sample([5] * 7, [7]),
    Sample([5] * 7, [7]),
]


def engine_of(path: str, mode: str) -> Any:
    model = {"trust_remote_code": True, "use_remove_padding": mode in ("rmpad", "packed")}
    engine = {"use_dynamic_bsz": mode != "prefix_grouper"}
    return make_engine(path, packed=mode in ("prefix_grouper", "packed"), model=model, engine=engine)


@pytest.mark.parametrize("mode", ["padded", "rmpad", "prefix_grouper", "packed"])
def test_exact_in_every_mode_and_gradients_reach_all_weights(checkpoint: str, mode: str) -> None:
    # Only fixed micro-batches keep padded groups whole.
    limit = {"micro_batch_size_per_gpu": 4} if mode == "prefix_grouper" else {"max_token_len_per_gpu": 60}
    flags = {"use_remove_padding": mode in ("rmpad", "packed"), "use_dynamic_bsz": mode != "prefix_grouper"}
    batch, engine = make_batch(SAMPLES, **flags, **limit), engine_of(checkpoint, mode)
    assert any("transformers_modules" in base.__module__ for base in type(engine.module).__mro__)
    found = run_engine(engine, batch)
    trusted = {"trust_remote_code": True} if "split" in checkpoint else {}  # Qwen3 against transformers' own class
    assert_same(found, run_reference(checkpoint, batch, actor_loss(), **trusted))
    trained = {name for name, gradient in found.gradients.items() if gradient.abs().max() > 0}
    assert trained == {name for name, _ in engine.module.named_parameters()}
    layers = [m for m in engine.module.modules() if isinstance(m, (LlamaDecoderLayer, Qwen3DecoderLayer))]
    assert len(layers) == engine.module.config.num_hidden_layers
    assert all(isinstance(layer, FSDPModule) for layer in layers), "a layer is gathered by itself"
