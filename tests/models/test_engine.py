"""The shipped models under verl's FSDP2 engine, padded and packed, against one sequence at a time."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

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


every_mode = pytest.mark.parametrize("mode", ["padded", "rmpad", "prefix_grouper", "packed"])


def engine_of(path: str, mode: str) -> Any:
    model = {"trust_remote_code": True, "use_remove_padding": mode in ("rmpad", "packed")}
    engine = {"use_dynamic_bsz": mode != "prefix_grouper"}
    return make_engine(path, packed=mode in ("prefix_grouper", "packed"), model=model, engine=engine)


def settings_of(mode: str) -> dict[str, Any]:
    """Of the batch; only fixed micro-batches keep padded groups whole."""
    limit = {"micro_batch_size_per_gpu": 4} if mode == "prefix_grouper" else {"max_token_len_per_gpu": 60}
    return {
        "use_remove_padding": mode in ("rmpad", "packed"),
        "use_dynamic_bsz": mode != "prefix_grouper",
        **limit,
    }


@every_mode
def test_patched_qwen3_is_exact_in_every_mode(qwen3: str, mode: str) -> None:
    batch = make_batch(SAMPLES, **settings_of(mode))
    engine = engine_of(qwen3, mode)
    assert any("transformers_modules" in base.__module__ for base in type(engine.module).__mro__)
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


@every_mode
def test_split_llama_is_exact_and_its_gradient_reaches_adapter_and_both_stacks(split_llama: str, mode: str) -> None:
    batch = make_batch(SAMPLES, **settings_of(mode))
    engine = engine_of(split_llama, mode)
    result = run_engine(engine, batch, actor_loss())
    assert_same(result, run_reference(split_llama, batch, actor_loss(), trust_remote_code=True))
    trained = {name for name, gradient in result.gradients.items() if gradient.abs().max() > 0}
    assert trained == {name for name, _ in engine.module.named_parameters()}
    assert {"model.adapter.weight", "model.embed_tokens.weight", "lm_head.weight"} < trained
    for stack in ("first", "last"):
        assert any(name.startswith(f"model.{stack}.layers.") for name in trained)


def test_fsdp2_shards_every_layer_of_both_stacks_and_a_step_changes_all_weights(split_llama: str) -> None:
    engine = engine_of(split_llama, "packed")
    layers = [*engine.module.model.first.layers, *engine.module.model.last.layers]
    assert len(layers) == 3
    assert all(type(layer).__name__.startswith("FSDP") for layer in layers)
    assert all(isinstance(parameter, DTensor) for parameter in engine.module.parameters())
    before = {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}
    with engine.train_mode():
        engine.train_batch(make_batch(SAMPLES), actor_loss())
    after = {name: p.full_tensor() for name, p in engine.module.named_parameters()}
    assert all(not torch.equal(before[name], after[name]) for name in before)
