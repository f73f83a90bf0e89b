"""Compiled decoder layers keep the numbers, and ragged micro-batches compile them once."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from benchmarks.batches import make_batch
from torch._dynamo import config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.exc import InductorError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.architectures.tiny_configs import tiny_config
from tests.support import PRECISIONS, actor_loss, check_exact, group, make_engine, old_outputs, run_engine, update
from verl_pg_plugin.engine import compiled_layers
from verl_pg_plugin.engine.compiled_layers import LayerCompilerError, compile_forward, compile_layers, compiling

BUDGET = 40  # of which the first group of each batch takes more
RAGGED = [[*group(20 + i, [5, 9, 1, 7 + i], i), *group(3 + i, [5, 3], 2), *group(33 - i, [4], 3)] for i in range(4)]
WHOLE, COMPILE = make_batch(RAGGED[0]), torch.compile


def forget_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()


def assert_compiled_once(runs: Iterable[Any]) -> None:
    """The first of ``runs``, which run as they are drawn, compiles something, and the others nothing more."""
    graphs = [counters["stats"]["unique_graphs"] for _ in runs]
    assert graphs[0] > 0, "nothing was compiled"
    assert set(graphs) == {graphs[0]}


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch, qwen3: str) -> Any:
    """An engine whose layers go through another compiler than Inductor, whose minute is for slow tests and GPUs."""

    def build(backend: Any, splits: bool = False, dynamic: bool = True, strategy: str = "fsdp2") -> Any:
        forget_graphs()
        compiler = partial(COMPILE, backend=backend)
        monkeypatch.setattr(compiled_layers.torch, "compile", lambda forward, **_: compiler(forward, dynamic=dynamic))
        return make_engine(qwen3, splits=splits, strategy=strategy, engine={"compile_layers": True})

    return build


def test_compiled_layers_keep_the_numbers_also_in_split_groups_and_compile_once(compile_with, qwen3: str) -> None:
    """With attention computed again they are compiled by the slow tests of tests/options."""
    compiled = compile_with("eager", splits=True)
    batches = (make_batch(samples, max_token_len_per_gpu=BUDGET) for samples in RAGGED)
    assert_compiled_once(check_exact(compiled, qwen3, batch, splits=True) for batch in batches)
    assert not counters["recompiles"]


@pytest.mark.slow
def test_in_bf16_updated_log_probs_are_the_old_ones_else_the_first_steps_kl_is_not_0(qwen3: str) -> None:
    engine = make_engine(qwen3, engine={**PRECISIONS["bf16"], "compile_layers": True})
    old = old_outputs(engine, WHOLE)["log_probs"]
    assert all(map(torch.equal, update(engine, WHOLE, return_model_output=True).outputs["log_probs"], old))


def test_without_gradient_a_layer_whose_input_requires_one_shares_the_graph_of_the_others(monkeypatch) -> None:
    forget_graphs()
    monkeypatch.setattr(compiled_layers.torch, "compile", partial(COMPILE, backend="eager"))
    layer = compile_forward(lambda x: 2 * x)
    with torch.no_grad():
        for requires_grad in (True, False):
            layer(torch.ones(4, requires_grad=requires_grad))
    assert counters["stats"]["unique_graphs"] == 1


class Products(TorchDispatchMode):
    """Counts products by the size of their weight, those of compiled graphs too, as a forward computes them.

    There a weight is transposed; a backward multiplies by it as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[int, ...]] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::mm", "aten::mm.out") and args[1].stride(0) == 1:
            self.calls[tuple(args[1].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_a_compiled_layer_that_is_recomputed_stops_in_front_of_its_last_product(compile_with) -> None:
    """In a graph that runs as a whole, as Inductor's do."""
    engine = compile_with("aot_eager", dynamic=False)
    with Products() as products:
        update(engine, WHOLE)
    hidden, intermediate, layers = 32, 48, 2
    assert products.calls[hidden, intermediate] == 2 * 2 * layers, "the other two matrices of each MLP, both times"
    assert products.calls[intermediate, hidden] == layers


def fail(graph: Any, inputs: Any) -> Any:
    raise OSError("the compiler ran out of disk")


def fail_as_inductor_does(graph: Any, inputs: Any) -> Any:
    raise InductorError(OSError("the compiler ran out of disk"), None)


def test_a_compiler_that_fails_is_named_with_the_way_around(compile_with) -> None:
    way_around = r"ran out of disk.*set \+\+prefix_grouper\.compile_layers=False"
    with pytest.raises(LayerCompilerError, match=way_around):
        update(compile_with(fail, dynamic=False), WHOLE)
    compile_with(aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fail_as_inductor_does))
    with pytest.raises(LayerCompilerError, match=way_around), compiling():
        compile_forward(lambda x: x.sin().cos())(torch.ones(3, requires_grad=True)).sum().backward()


def test_a_layer_that_is_recomputed_in_other_dtypes_than_it_ran_in_is_named_with_the_way_around() -> None:
    dtypes, x = iter((torch.bfloat16, torch.float32)), torch.ones(3, requires_grad=True)
    way_around = r"CheckpointError.*metadata.*set \+\+prefix_grouper.compile_layers=False"
    with pytest.raises(LayerCompilerError, match=way_around), compiling():
        checkpoint(lambda x: x.to(next(dtypes)) ** 2, x, use_reentrant=False).sum().backward()


def test_a_loss_that_torch_cannot_compile_is_not_said_to_be_a_layer(compile_with) -> None:
    """Whose override would not help."""

    @torch.compile(fullgraph=True, backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return 2 * x

    def loss(*args: Any, **kwargs: Any) -> Any:
        value, metrics = actor_loss()(*args, **kwargs)
        return doubled(value), metrics

    with pytest.raises(Unsupported):
        update(compile_with("eager", dynamic=False), WHOLE, loss)


def test_a_layer_that_torch_would_no_longer_compile_stops_the_run(compile_with, monkeypatch) -> None:
    """torch itself would go on without compiling, for the rest of the training, after a line in the log."""
    monkeypatch.setitem(compiled_layers.DYNAMO_SETTINGS, "recompile_limit", 1)
    with pytest.raises(LayerCompilerError, match=r"has made 1 graphs.*prefix_grouper\.compile_layers=False"):
        run_engine(compile_with("eager", dynamic=False), WHOLE)


def settings() -> dict[str, Any]:
    """Those of torch that compiled layers change, as they are now."""
    return {name: getattr(config, name) for name in compiled_layers.DYNAMO_SETTINGS} | {
        name: getattr(functorch_config, name) for name in compiled_layers.AUTOGRAD_SETTINGS
    }


def test_a_forward_compiles_all_in_settings_that_no_loss_sees(compile_with) -> None:
    """Else the backward compiles, and the checkpoint meets tensors and operators that the forward never had.

    A GPU's backward has a thread of its own; a compiled loss may have a number that changes in every step.
    """
    ours = compiled_layers.DYNAMO_SETTINGS | compiled_layers.AUTOGRAD_SETTINGS
    torchs = settings()
    found, compiled_by_the_loss = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(settings())
        return graph.forward

    def loss(*args: Any, **kwargs: Any) -> Any:
        assert settings() == torchs
        compiled_by_the_loss.append(len(found))
        return actor_loss()(*args, **kwargs)

    update(compile_with(backend, dynamic=False), WHOLE, loss)
    assert compiled_by_the_loss == [len(found)] != [0]
    thread = Thread(target=compile_forward(torch.sin), args=(torch.ones(3),))
    thread.start()
    thread.join()
    assert len(found) == compiled_by_the_loss[0] + 1
    assert all(seen == ours for seen in found)
    assert settings() == torchs != ours


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_counts_and_sizes_of_weights_are_numbers_else_kernels_are_slower(compile_with, strategy: str) -> None:
    found: list[tuple[str, Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend((node.target, node.meta["example_value"]) for node in graph.graph.find_nodes(op="placeholder"))
        return graph.forward

    update(compile_with(backend, strategy=strategy), WHOLE)
    shapes = [value.shape for _, value in found if isinstance(value, torch.Tensor)]
    of_any_size = {len(shape) for shape in shapes if not all(type(size) is int for size in shape)}
    assert min(of_any_size) == 3, "weights have two dimensions at most"
    assert not [name for name, value in found if isinstance(value, torch.SymInt) and name.startswith("L_self")]


def test_experts_with_transposed_weights_compile_for_any_number_of_tokens() -> None:
    """Those of gpt-oss. torch would end in an error that is of neither the compiler nor the model."""
    compile_layers(transformers.AutoModelForCausalLM.from_config(tiny_config("gpt_oss")))
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((5, 16), (2, 16, 16))]
    twice, rows = torch.arange(10) // 2, torch.tensor([4, 10], dtype=torch.int32)

    def experts(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(tokens.sin()[twice], weights, offs=rows).float().square().sum()

    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.autograd.grad(compile_forward(experts)(*inputs), inputs)
    torch.testing.assert_close(compiled, torch.autograd.grad(experts(*inputs), inputs))


def test_compiled_layers_of_a_model_are_of_one_class_or_fsdp1_wraps_the_first_alone(qwen3: str) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(qwen3)
    compile_layers(module)
    assert len({type(layer) for layer in module.model.layers}) == 1


def test_a_model_that_names_no_layers_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module._no_split_modules = None
    with pytest.raises(ValueError, match="compile_layers=False"):
        compile_layers(module)
