"""A compiled layer that is recomputed stops in front of its MLP's last product, with the gradients it had."""

from collections.abc import Iterator

import pytest
import torch

from tests.engine.test_kept_layers import BUDGET, INTERMEDIATE, LAYERS, SAMPLES, Products, update
from tests.support import Result, actor_loss, assert_same, make_engine, run_reference, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

HIDDEN = 32


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=LAYERS, intermediate_size=INTERMEDIATE)


def test_a_compiled_layer_that_is_recomputed_stops_in_front_of_its_last_product(qwen3: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"compile_layers": True})
    _, gradients = update(engine, budget=4 * BUDGET)
    expected = run_reference(qwen3, make_batch(SAMPLES), actor_loss()).gradients
    assert_same(Result({}, gradients), Result({}, expected))
    with Products() as products:
        update(engine, budget=4 * BUDGET)
    assert products.calls[HIDDEN, INTERMEDIATE] == 2 * 2 * LAYERS, "the other two matrices of each MLP, both times"
    assert products.calls[INTERMEDIATE, HIDDEN] == LAYERS
