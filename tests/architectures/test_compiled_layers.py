"""The types whose layers are compiled by default are as exact compiled as they are uncompiled, and compile once."""

from pathlib import Path

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from tests.architectures.outcome import EXACT, HYBRIDS, model_class, outcome_of, supports_checkpointing
from tests.architectures.test_every_model import SAMPLES, SEED, ZERO_GRADIENTS, without
from tests.architectures.test_gpu_models import DENSE, assert_as_close_as_stock, save_dense, zero_gradients
from tests.architectures.tiny_configs import MODEL_TYPES, tiny_config
from tests.support import actor_loss, assert_same, clone, group, make_engine, run_engine, run_reference
from verl_pg_plugin.architectures import REFUSED_TYPES, UNCOMPILED, WRONG_COMPILED
from verl_pg_plugin.synthetic import make_batch

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.slow, pytest.mark.timeout(1200)]

TYPES = sorted(set(MODEL_TYPES) - HYBRIDS - WRONG_COMPILED.keys() - UNCOMPILED.keys() - REFUSED_TYPES.keys())
"""Hybrids and types with pictures are run compiled by ``tests/mixers`` and ``tests/modalities``."""
RAGGED = [[*group(20 + 3 * i, [5, 9, 1, 7 + i], i), *group(3 + i, [5, 3], 2)] for i in range(1, 4)]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()


def experts_of(config: transformers.PretrainedConfig) -> dict[str, str]:
    """Experts as one product of matrices: the grouped product that a GPU runs is a loop over them on a CPU."""
    chosen = model_class(config)._can_set_experts_implementation()
    return {"_experts_implementation": "batched_mm"} if chosen else {}


@pytest.mark.parametrize("model_type", TYPES)
def test_compiled_layers_are_exact_and_ragged_batches_compile_them_once(
    model_type: str, tmp_path: Path
) -> None:
    if outcome_of(model_type).status != EXACT:
        pytest.skip("is refused")
    config = tiny_config(model_type)
    torch.manual_seed(SEED)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    engine = make_engine(
        str(tmp_path),
        packed=True,
        engine={"compile_layers": True},
        model={
            "enable_gradient_checkpointing": supports_checkpointing(model_type),
            "override_config": {"attn_implementation": "sdpa", **experts_of(config)},
        },
    )
    zero, graphs = ZERO_GRADIENTS.get(model_type, set()), []
    for samples in (SAMPLES, *RAGGED):
        batch = make_batch(samples)
        got, want = run_engine(engine, clone(batch), actor_loss()), run_reference(str(tmp_path), batch, actor_loss())
        assert_same(without(got, zero), without(want, zero))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert set(graphs) == {graphs[0]}


@pytest.mark.parametrize("model_type", DENSE)
def test_compiled_layers_in_bf16_are_as_exact_as_stock_rmpad(model_type: str, tmp_path: Path) -> None:
    """A layer that computes something in float32 may be compiled otherwise than it runs, or recomputed otherwise."""
    path, zero = save_dense(tmp_path, model_type), zero_gradients(model_type)
    assert_as_close_as_stock(path, "auto", compiled=True, zero=zero, attn_implementation="sdpa")


@pytest.mark.parametrize("model_type", sorted(WRONG_COMPILED))
def test_types_that_are_refused_compiled_would_not_be_exact(model_type: str, tmp_path: Path, monkeypatch) -> None:
    """Where this fails, a type can be taken off the list."""
    why = WRONG_COMPILED[model_type]
    monkeypatch.delitem(WRONG_COMPILED, model_type)
    with pytest.raises(AssertionError, match="off by"):
        test_compiled_layers_are_exact_and_ragged_batches_compile_them_once(model_type, tmp_path)
    assert " off " in why
