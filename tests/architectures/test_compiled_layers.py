"""Types that are compiled by default are as exact compiled as uncompiled, and compile once."""

from pathlib import Path

import pytest

from tests.architectures.outcome import model_class
from tests.architectures.test_every_model import SAMPLES, assert_exact, engine_of
from tests.architectures.test_gpu_models import COMPILED, STOCK_ATTENTION, assert_compiled_as_close
from tests.architectures.tiny_configs import tiny_config
from tests.engine.test_compiled_layers import assert_compiled_once, forget_graphs
from tests.support import group
from verl_pg_plugin.config.compile import WRONG_COMPILED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RAGGED = [[*group(20 + 3 * i, [5, 9, 1, 7 + i], i), *group(3 + i, [5, 3], 2)] for i in range(1, 4)]
nothing_compiled = pytest.fixture(autouse=True)(forget_graphs)


@pytest.mark.parametrize("model_type", COMPILED)
def test_compiled_layers_are_exact_and_compile_once(model_type: str, tmp_path: Path) -> None:
    overrides = {"attn_implementation": STOCK_ATTENTION.get(model_type, "sdpa")}
    if model_class(tiny_config(model_type))._can_set_experts_implementation():
        # The grouped product that a GPU runs is a loop over experts on a CPU.
        overrides["_experts_implementation"] = "batched_mm"
    engine = engine_of(model_type, tmp_path, {"compile_layers": True}, {"override_config": overrides})
    assert_compiled_once(assert_exact(engine, model_type, tmp_path, samples) for samples in (SAMPLES, *RAGGED))


@pytest.mark.parametrize("model_type", COMPILED)
def test_compiled_layers_in_bf16_are_as_exact_as_stock_rmpad(model_type: str, tmp_path: Path) -> None:
    """A layer with float32 parts may compute or recompute them differently when compiled."""
    assert_compiled_as_close(tmp_path, model_type, STOCK_ATTENTION.get(model_type, "sdpa"))


@pytest.mark.parametrize("model_type", sorted(WRONG_COMPILED))
def test_types_refused_compiled_are_inexact(model_type: str, tmp_path: Path, monkeypatch) -> None:
    """If this fails, remove the type from the list."""
    assert " off " in WRONG_COMPILED[model_type]
    monkeypatch.delitem(WRONG_COMPILED, model_type)
    with pytest.raises(AssertionError, match="off by"):
        test_compiled_layers_are_exact_and_compile_once(model_type, tmp_path)
