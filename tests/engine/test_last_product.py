"""A compiled layer that is recomputed stops in front of its MLP's last product, with the gradients it had."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from verl_pg_plugin.engine.last_product import last_product, leave_out

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


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_product_stays_inside_of_the_graph(frozen: bool) -> None:
    """Under LoRA its own products come behind it, so nothing could stop in front of it."""
    product, graphs = nn.Linear(3, 3).requires_grad_(not frozen), []
    leave_out(product)

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph.code)
        return graph.forward

    torch.compile(lambda x: product(x.sin()).sin(), backend=compiler)(torch.ones(2, 3, requires_grad=True))
    assert any("linear" in graph for graph in graphs) == frozen


@pytest.mark.parametrize("norm", ["post_feedforward_layernorm", "post_mlp_layernorm", None])
def test_a_product_that_a_norm_reads_is_not_the_last(norm: str | None) -> None:
    """Its result is wanted in the backward, so it is computed again anyway."""
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"down_proj": nn.Linear(3, 3)})})
    if norm:
        layer[norm] = nn.Identity()
    assert (last_product(layer) is None) == (norm is not None)
