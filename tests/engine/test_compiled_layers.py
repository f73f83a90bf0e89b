"""Compiled decoder layers keep the numbers, and ragged micro-batches compile them once."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from threading import Thread
from typing import Any
from unittest.mock import Mock

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

BUDGET = 40  # less than the first group of each batch
RAGGED = [[*group(20 + i, [5, 9, 1, 7 + i], i), *group(3 + i, [5, 3], 2), *group(33 - i, [4], 3)] for i in range(3)]
WHOLE, COMPILE = make_batch(RAGGED[0]), torch.compile


def forget_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()


def assert_compiled_once(runs: Iterable[Any]) -> None:
    """Iterate ``runs``; only the first may compile graphs."""
    graphs = [counters["stats"]["unique_graphs"] for _ in runs]
    assert graphs[0] > 0, "nothing was compiled"
    assert set(graphs) == {graphs[0]}


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch, qwen3: str) -> Any:
    """Build engines whose layers go through ``backend``: Inductor takes a minute."""

    def build(backend: Any, splits: bool = False, dynamic: bool = True, strategy: str = "fsdp2") -> Any:
        forget_graphs()
        compiler = partial(COMPILE, backend=backend)
        monkeypatch.setattr(compiled_layers.torch, "compile", lambda forward, **_: compiler(forward, dynamic=dynamic))
        return make_engine(qwen3, splits=splits, strategy=strategy, engine={"compile_layers": True})

    return build


def test_compiled_layers_are_exact_in_split_groups_and_compile_once(compile_with, qwen3: str) -> None:
    """tests/options has compiled layers with recomputed attention."""
    compiled = compile_with("eager", splits=True)
    batches = (make_batch(samples, max_token_len_per_gpu=BUDGET) for samples in RAGGED)
    assert_compiled_once(check_exact(compiled, qwen3, batch, splits=True) for batch in batches)
    assert not counters["recompiles"]


@pytest.mark.slow
def test_log_probs_of_the_update_equal_the_old_ones_bit_for_bit_in_bf16(qwen3: str) -> None:
    """Else the first step's KL is not 0."""
    engine = make_engine(qwen3, engine={**PRECISIONS["bf16"], "compile_layers": True})
    old = old_outputs(engine, WHOLE)["log_probs"]
    assert all(map(torch.equal, update(engine, WHOLE, return_model_output=True).outputs["log_probs"], old))


def test_without_grad_inputs_that_require_grad_compile_no_second_graph(monkeypatch) -> None:
    forget_graphs()
    monkeypatch.setattr(compiled_layers.torch, "compile", partial(COMPILE, backend="eager"))
    layer = compile_forward(lambda x: 2 * x)
    with torch.no_grad():
        for requires_grad in (True, False):
            layer(torch.ones(4, requires_grad=requires_grad))
    assert counters["stats"]["unique_graphs"] == 1


class Products(TorchDispatchMode):
    """Count the matrix products of forwards by the shape of the weight, also in compiled graphs.

    A forward multiplies by the transposed weight, a backward by the weight.
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


def test_a_recomputed_compiled_layer_skips_its_last_product(compile_with) -> None:
    """The graph runs as a whole, like Inductor's."""
    engine = compile_with("aot_eager", dynamic=False)
    with Products() as products:
        update(engine, WHOLE)
    hidden, intermediate, layers = 32, 48, 2
    assert products.calls[hidden, intermediate] == 2 * 2 * layers, "the other two matrices of each MLP, both times"
    assert products.calls[intermediate, hidden] == layers


def test_a_compiler_error_names_its_cause_and_fix(compile_with) -> None:
    error, fix = (
        OSError("the compiler ran out of disk"),
        r"ran out of disk.*set \+\+prefix_grouper\.compile_layers=False",
    )
    with pytest.raises(LayerCompilerError, match=fix):
        update(compile_with(Mock(side_effect=error), dynamic=False), WHOLE)
    in_backward = Mock(side_effect=InductorError(error, None))
    compile_with(aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=in_backward))
    with pytest.raises(LayerCompilerError, match=fix), compiling():
        compile_forward(lambda x: x.sin().cos())(torch.ones(3, requires_grad=True)).sum().backward()


def test_recomputation_in_another_dtype_is_an_error_with_its_fix() -> None:
    dtypes, x = iter((torch.bfloat16, torch.float32)), torch.ones(3, requires_grad=True)
    fix = r"CheckpointError.*metadata.*set \+\+prefix_grouper.compile_layers=False"
    with pytest.raises(LayerCompilerError, match=fix), compiling():
        checkpoint(lambda x: x.to(next(dtypes)) ** 2, x, use_reentrant=False).sum().backward()


def test_an_error_that_compiles_a_loss_is_raised_unchanged(compile_with) -> None:

    @torch.compile(fullgraph=True, backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return 2 * x

    def loss(*args: Any, **kwargs: Any) -> Any:
        value, metrics = actor_loss()(*args, **kwargs)
        return doubled(value), metrics

    with pytest.raises(Unsupported):
        update(compile_with("eager", dynamic=False), WHOLE, loss)


def test_the_recompile_limit_is_an_error(compile_with, monkeypatch) -> None:
    """torch itself would run the layer uncompiled for the rest of the training."""
    monkeypatch.setitem(compiled_layers.DYNAMO_SETTINGS, "recompile_limit", 1)
    with pytest.raises(LayerCompilerError, match=r"has made 1 graphs.*prefix_grouper\.compile_layers=False"):
        run_engine(compile_with("eager", dynamic=False), WHOLE)


def settings() -> dict[str, Any]:
    """Current values of the torch settings that compiled layers change."""
    return {name: getattr(config, name) for name in compiled_layers.DYNAMO_SETTINGS} | {
        name: getattr(functorch_config, name) for name in compiled_layers.AUTOGRAD_SETTINGS
    }


def test_forwards_compile_everything_with_settings_that_no_loss_sees(compile_with) -> None:
    """A graph that the backward compiles would not match the checkpoint.

    A GPU's backward runs in another thread, and a compiled loss needs torch's own settings.
    """
    ours = compiled_layers.DYNAMO_SETTINGS | compiled_layers.AUTOGRAD_SETTINGS
    stock, compiled_with, num_compiled = settings(), [], []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_with.append(settings())
        return graph.forward

    def loss(*args: Any, **kwargs: Any) -> Any:
        assert settings() == stock
        num_compiled.append(len(compiled_with))
        return actor_loss()(*args, **kwargs)

    update(compile_with(backend, dynamic=False), WHOLE, loss)
    assert num_compiled == [len(compiled_with)] != [0]
    thread = Thread(target=compile_forward(torch.sin), args=(torch.ones(3),))
    thread.start()
    thread.join()
    assert len(compiled_with) == num_compiled[0] + 1
    assert all(seen == ours for seen in compiled_with)
    assert settings() == stock != ours


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_weight_shapes_and_counts_are_constants_in_compiled_graphs(compile_with, strategy: str) -> None:
    """Kernels for symbolic sizes are slower."""
    values: list[tuple[str, Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        values.extend((node.target, node.meta["example_value"]) for node in graph.graph.find_nodes(op="placeholder"))
        return graph.forward

    update(compile_with(backend, strategy=strategy), WHOLE)
    shapes = [value.shape for _, value in values if isinstance(value, torch.Tensor)]
    dynamic = {len(shape) for shape in shapes if not all(type(size) is int for size in shape)}
    assert min(dynamic) == 3, "weights have two dimensions at most"
    assert not [name for name, value in values if isinstance(value, torch.SymInt) and name.startswith("L_self")]


def test_gpt_oss_experts_compile_for_any_number_of_tokens() -> None:
    """torch alone raises an error on their transposed weights."""
    compile_layers(transformers.AutoModelForCausalLM.from_config(tiny_config("gpt_oss")))
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((5, 16), (2, 16, 16))]
    twice, rows = torch.arange(10) // 2, torch.tensor([4, 10], dtype=torch.int32)

    def experts(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(tokens.sin()[twice], weights, offs=rows).float().square().sum()

    # Traced again in every run; C++ that was compiled before is reused.
    with torch._inductor.config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        compiled = torch.autograd.grad(compile_forward(experts)(*inputs), inputs)
    torch.testing.assert_close(compiled, torch.autograd.grad(experts(*inputs), inputs))


def test_compiled_layers_have_one_class_so_that_fsdp1_wraps_all(qwen3: str) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(qwen3)
    compile_layers(module)
    assert len({type(layer) for layer in module.model.layers}) == 1


def test_a_model_without_layer_names_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module._no_split_modules = None
    with pytest.raises(ValueError, match="compile_layers=False"):
        compile_layers(module)
