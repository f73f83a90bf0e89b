"""Compiled decoder layers keep the numbers, and ragged micro-batches compile them once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support import actor_loss, assert_same, clone, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.engine.compiled_layers import compile_layers
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

BUDGET = 64
RAGGED = [[*group(20 + i, [5, 9, 1, 7 + i], i), *group(3 + i, [5, 3], 2), *group(33 - i, [4], 3)] for i in range(4)]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compile_counts(engine: Any, batches: list[list[Sample]]) -> list[int]:
    """Graphs compiled so far, after an update on each of the batches."""
    counts = []
    for samples in batches:
        with engine.train_mode():
            engine.forward_backward_batch(make_batch(samples, max_token_len_per_gpu=BUDGET), actor_loss())
            engine.optimizer_zero_grad()
        counts.append(counters["stats"]["unique_graphs"])
    return counts


@pytest.mark.parametrize("static", [True, False], ids=["one shape", "dynamic shapes"])
def test_ragged_micro_batches_compile_once(qwen3: str, static: bool) -> None:
    engine = make_engine(qwen3, packed=True, engine={"compile_layers": True, "static_rows": static})
    first, *later = compile_counts(engine, RAGGED)
    assert first > 0, "nothing was compiled"
    assert set(later) == {first}
    assert not counters["recompiles"]


@pytest.mark.parametrize("options", [{}, {"static_rows": True}, {"recompute_attention": True}], ids=str)
def test_compiled_layers_keep_the_numbers(qwen3: str, options: dict) -> None:
    engine = make_engine(qwen3, packed=True, engine={"compile_layers": True, **options})
    for samples in RAGGED[:2]:
        batch = make_batch(samples, max_token_len_per_gpu=BUDGET)
        assert_same(run_engine(engine, clone(batch), actor_loss()), run_reference(qwen3, batch, actor_loss()))


def test_a_model_that_names_no_layers_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module._no_split_modules = None
    with pytest.raises(ValueError, match="compile_layers=False"):
        compile_layers(module, dynamic=True)
