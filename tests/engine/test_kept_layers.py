"""Layers that keep activations recompute nothing, hold what their budget says, and change no bit of a gradient."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import (
    Result,
    actor_loss,
    assert_same,
    clone,
    full_gradients,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin.cost.kept_layers import LayerActivations
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

LAYERS, INTERMEDIATE = 4, 48
SAMPLES = [*group(11, [5, 9, 4], 1), *group(7, [6, 4], 2)]
BUDGET = 34
"""Rows of a micro-batch: one for each group."""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=LAYERS, intermediate_size=INTERMEDIATE)


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


def update(engine: Any, samples: list[Sample] = SAMPLES, budget: int = BUDGET) -> tuple[dict, dict]:
    """Metrics and gradients."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        batch = make_batch(samples, max_token_len_per_gpu=budget)
        metrics = engine.forward_backward_batch(batch, actor_loss())["metrics"]
        return metrics, full_gradients(engine.module)


def gib_of(layers: float, engine: Any, samples: list[Sample] = SAMPLES) -> float:
    """What so many layers hold of a micro-batch with all samples."""
    (held,) = engine.keeper.budget.bytes_per_row.values()
    rows = sum(len(sample.response) for sample in samples) + sum({len(s.prompt) - 1 for s in samples})
    return layers * held * rows / 2**30


def test_the_last_layers_of_a_budget_are_not_recomputed_and_no_bit_changes(qwen3: str) -> None:
    _, expected = update(make_engine(qwen3, packed=True), budget=4 * BUDGET)
    engine = make_engine(qwen3, packed=True, engine={"keep_activations": "all"})
    kept = []
    for layers in (LAYERS, 2.5, 0.5):
        if layers < LAYERS:
            engine.keeper.budget.asked = gib_of(layers, engine)
        with Products() as products:
            metrics, gradients = update(engine, budget=4 * BUDGET)
        assert all(torch.equal(gradients[name], want) for name, want in expected.items())
        assert products.calls[32, INTERMEDIATE] == 2 * (LAYERS + LAYERS - int(layers))
        kept.append((metrics["prefix_grouper/kept_layers"], metrics["prefix_grouper/kept_gib"]))
    assert kept == [([float(int(n))], [pytest.approx(gib_of(int(n), engine))]) for n in (LAYERS, 2.5, 0.5)]


def test_kept_layers_are_exact_over_micro_batches_that_keep_different_numbers(qwen3: str) -> None:
    samples = [*SAMPLES, *group(16, [9, 9], 5)]
    engine = make_engine(qwen3, packed=True, engine={"keep_activations": "all"})
    update(engine)
    engine.keeper.budget.asked = gib_of(3.2, engine, SAMPLES[:3])
    batch = make_batch(samples, max_token_len_per_gpu=BUDGET)
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))
    metrics, _ = update(engine, samples)
    (mean,) = metrics["prefix_grouper/kept_layers"]
    assert mean * 3 == 3 + 4 + 2  # of the groups with 29 rows, 17 and 34


def test_the_first_mini_batch_of_a_budget_keeps_one_layer_and_measures_it(qwen3: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"keep_activations": 1.0})
    kept = [update(engine)[0]["prefix_grouper/kept_layers"] for _ in range(2)]
    assert kept == [[1.0], [float(LAYERS)]]


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("compiled", [False, True], ids=["as it comes", "compiled"])
def test_mlps_that_are_kept_are_not_recomputed_and_hold_less_than_their_layers(qwen3: str, compiled: bool) -> None:
    found = {}
    for keep in ("attention", "mlp", "all"):
        engine = make_engine(qwen3, packed=True, engine={"compile_layers": compiled, "keep_activations": keep})
        _, gradients = update(engine)
        graphs = counters["stats"]["unique_graphs"]
        with Products() as products:
            again, _ = update(engine, [*SAMPLES, *group(16, [9, 9], 5)])  # other numbers of rows
        assert counters["stats"]["unique_graphs"] == graphs
        found[keep] = gradients, again.get("prefix_grouper/kept_gib"), products.calls
    assert all(torch.equal(found["mlp"][0][name], want) for name, want in found["attention"][0].items())
    assert found["mlp"][1] < found["all"][1]
    into_mlp = {keep: calls[32, INTERMEDIATE] for keep, (*_, calls) in found.items()}
    assert 2 * into_mlp["mlp"] == 2 * into_mlp["all"] == into_mlp["attention"]
    # Queries and the half's last product, which are as wide: the second is not computed again.
    of_half = {keep: calls[32, 32] for keep, (*_, calls) in found.items()}
    assert of_half["mlp"] / of_half["attention"] == (2 + 1) / (2 + 2)


@pytest.mark.usefixtures("nothing_compiled")
def test_in_bf16_too_what_is_kept_changes_no_bit_of_compiled_layers(qwen3: str) -> None:
    """Other graphs would round elsewhere, and what memory is left would decide what is learned."""
    bf16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    gradients = []
    for keep in ("attention", "all", "mlp"):
        engine = make_engine(qwen3, packed=True, engine={**bf16, "compile_layers": True, "keep_activations": keep})
        gradients.append(update(engine, budget=4 * BUDGET)[1])
    assert all(torch.equal(found[name], want) for found in gradients[1:] for name, want in gradients[0].items())


def test_copies_of_keys_are_not_held(qwen3: str) -> None:
    """They would be most of what is held of a prompt with many short responses."""
    held = []
    for samples in (group(40, [2] * 16, 1), group(40, [32], 1)):
        engine = make_engine(qwen3, packed=True, engine={"keep_activations": "all"})
        update(engine, samples, budget=200)
        held.extend(engine.keeper.budget.bytes_per_row.values())
    assert held[0] == pytest.approx(held[1], rel=0.01)


def test_a_forward_without_gradient_keeps_nothing_and_verify_mode_passes(qwen3: str) -> None:
    options = {"keep_activations": "all", "verify": "every_n", "verify_every": 1}
    engine = make_engine(qwen3, packed=True, engine=options)
    batch = make_batch(SAMPLES, max_token_len_per_gpu=BUDGET)
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))
    with engine.eval_mode():
        assert "prefix_grouper/kept_layers" not in engine.infer_batch(clone(batch))["metrics"]
    assert set(engine.keeper.budget.bytes_per_row.values()) != {0.0}


class MemoryEnds(torch.autograd.Function):
    """The identity, in whose backward memory ends where more layers are kept than there is room for."""

    engine: Any
    room = 0
    tried: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        layers, _ = MemoryEnds.engine.keeper._kept[-1]
        if len(MemoryEnds.engine.keeper._kept) == 2:  # gradients of the first micro-batch are there
            MemoryEnds.tried.append(len(layers))
            if len(layers) > MemoryEnds.room:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient


@pytest.fixture
def memory_ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[int]]:
    """In the backward of the second layer of an engine, from here on; returns how many layers each attempt kept."""

    def ends(engine: Any) -> list[int]:
        monkeypatch.setattr(MemoryEnds, "engine", engine, raising=False)
        monkeypatch.setattr(MemoryEnds, "tried", [])
        monkeypatch.setattr(MemoryEnds, "room", 1)
        mlp = engine.module.model.layers[1].mlp
        forward = mlp.forward
        monkeypatch.setattr(mlp, "forward", lambda x: MemoryEnds.apply(forward(x)))
        return MemoryEnds.tried

    return ends


@pytest.mark.parametrize("resets", [True, False], ids=["torch resets", "older torch"])
@pytest.mark.parametrize("measured", [True, False], ids=["measured", "first mini-batch"])
def test_where_memory_ends_in_a_backward_the_mini_batch_starts_over_with_half_as_much_and_later_ones_are_exact(
    qwen3: str,
    memory_ends: Callable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    measured: bool,
    resets: bool,
) -> None:
    if not resets:
        monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)  # torch 2.11 has none
    engine = make_engine(qwen3, packed=True, engine={"keep_activations": "all"})
    if measured:
        update(engine, SAMPLES[:2])
    tried = memory_ends(engine)
    batch = make_batch([*group(11, [5, 9], 1), *group(11, [9, 5], 2)], max_token_len_per_gpu=BUDGET)
    expected = run_reference(qwen3, batch, actor_loss())
    for _ in range(3):
        assert_same(run_engine(engine, batch, actor_loss()), expected)
    assert tried == [4, 2, 1, 1, 1], "what was too much once is not tried again"
    assert caplog.text.count("out of memory; the mini-batch starts over") == 2


def test_memory_that_ends_with_nothing_kept_or_with_gradients_to_lose_is_an_error(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for keep, message in (
        ("all", "2 of 4 layers|4 of 4 layers.*keep_activations=attention"),
        ("attention", "^CUDA out"),
    ):
        engine = make_engine(qwen3, packed=True, engine={"keep_activations": keep})
        batch = make_batch(SAMPLES, max_token_len_per_gpu=BUDGET)
        with engine.train_mode(), monkeypatch.context() as patched:
            engine.forward_backward_batch(clone(batch), actor_loss())
            patched.setattr(engine, "prepare_model_outputs", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError, match=message):
                engine.forward_backward_batch(clone(batch), actor_loss())
        assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


def out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_model_whose_layers_do_not_checkpoint_themselves_is_refused(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_pg_plugin.engine.kept_layers.decoder_layers", lambda module: [])
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM are not checkpointed.*set .*keep_activations=attention"):
        make_engine(qwen3, packed=True, engine={"keep_activations": "all"})


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_layers_hold_what_the_cost_says_and_compile_once(qwen3: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"compile_layers": True, "keep_activations": "all"})
    engine.keeper.budget.asked = 1e-9  # nothing is kept after the first mini-batch, which measures
    update(engine)
    _, recomputed = update(engine)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for asked in (gib_of(1.5, engine, SAMPLES[:3]), "all"):
        engine.keeper.budget.asked = asked
        _, gradients = update(engine)
        assert all(torch.equal(gradients[name], want) for name, want in recomputed.items())
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["recompiles"]
    assert_same(Result({}, gradients), Result({}, run_reference(qwen3, make_batch(SAMPLES), actor_loss()).gradients))
    activations = LayerActivations.of(transformers.AutoConfig.from_pretrained(qwen3), torch.float32)
    assert list(engine.keeper.budget.bytes_per_row.values()) == [pytest.approx(activations.bytes, rel=0.02)]
