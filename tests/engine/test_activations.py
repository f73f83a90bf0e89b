"""A level changes no bit of what layers keep for their backward, and nothing of it outlives its graph."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
import torch
from benchmarks.batches import make_batch
from tensordict import TensorDict
from transformers import PreTrainedModel

from tests.architectures.tiny_configs import save_causal
from tests.engine.carried_cases import trie
from tests.engine.ranks import on_ranks
from tests.engine.test_exactness import FUSED_HEAD
from tests.engine.test_heads import SAMPLES
from tests.mixers.hybrids import save_hybrid
from tests.modalities.tiny_vision import KINDS, MIXED, image_batch, save_vision_model
from tests.precision import BF16
from tests.support import Result, assert_same, infer, make_engine, run_reference, save_tiny_model, splitting, update
from verl_pg_plugin.engine import activations, compiled_layers
from verl_pg_plugin.engine import engine as engine_module
from verl_pg_plugin.planning.activation_level import Level, MemoryBudget
from verl_pg_plugin.planning.activation_policy import ActivationPolicy
from verl_pg_plugin.planning.memory import WeightBytes
from verl_pg_plugin.upstream import UpstreamChangedError

LAYERS = 4
CUT = make_batch(SAMPLES, max_token_len_per_gpu=40)
LORA = {"lora_rank": 2, "lora_alpha": 4, "target_modules": "all-linear"}
KEEPING = [Level.ATTENTION, Level.ATTENTION_ON_HOST, Level.INPUTS_ON_HOST]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST", 1)


class LateCopier:
    """Copies when something waits for it and no sooner: what reads without waiting reads NaN."""

    def __init__(self) -> None:
        self.copies: Counter[str] = Counter()

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, SimpleNamespace]:
        self.copies["out"] += 1
        host = torch.full_like(x, torch.nan)
        return host, _once(lambda: host.copy_(x))

    def back(self, host: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, SimpleNamespace]:
        assert not host.isnan().any(), "comes back before it has left"
        assert host.stride() == like.stride()
        self.copies["back"] += 1
        x = torch.full_like(host, torch.nan)
        return x, _once(lambda: x.copy_(host))


def _once(copy: Callable[[], Any]) -> SimpleNamespace:
    waiting = [copy]
    return SimpleNamespace(wait=lambda: waiting.pop()() if waiting else None)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the device that was let go of is overwritten: what still reads it reads NaN."""
    leave = activations.CheckpointRecord.leave_device

    def leave_nothing(call: Any) -> None:
        left = [copy.x for copy in call._copies]
        leave(call)
        for x in left:
            x.fill_(torch.nan)

    monkeypatch.setattr(activations.CheckpointRecord, "leave_device", leave_nothing)


def watched(engine: Any) -> LateCopier:
    """The copier of ``engine`` from here on."""
    copier = engine._copier = LateCopier()
    return copier


def update_at(level: Level | str, engine: Any, batch: TensorDict, **options: Any) -> Result:
    if engine._copier is None:
        watched(engine)
    engine.options = replace(engine.options, activations=getattr(level, "value", level))
    return update(engine, batch, return_model_output=True, **options)


def same_bits(results: list[Result]) -> bool:
    first, *others = (result.gradients for result in results)
    assert first, "no gradient"
    return all(x.keys() == first.keys() and all(torch.equal(x[n], first[n]) for n in first) for x in others)


WAYS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp": {"strategy": "fsdp", "engine": {"use_orig_params": True}},
    "bf16": {"engine": BF16},
    "LoRA": {"model": LORA},
    "compiled": {"engine": {"compile_layers": True}},
    "padded groups": {"padded": True},
    "split groups": {"splits": True},
    "split groups in bf16": {"splits": True, "engine": BF16},
}
SAVED: dict[str, Callable[[Path], str]] = {
    "experts": lambda folder: save_causal(folder, "qwen3_moe"),
    "layers without attention": save_hybrid,  # which keep their inputs at every level
    "images": lambda folder: save_vision_model(folder, KINDS[1]),
}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("way", [*WAYS, *SAVED])
def test_a_level_changes_no_bit_of_any_gradient(qwen3: str, way: str, tmp_path: Path, monkeypatch) -> None:
    torch._dynamo.reset()
    compiler = partial(torch.compile, backend="aot_eager", dynamic=False)
    monkeypatch.setattr(compiled_layers.torch, "compile", lambda forward, **_: compiler(forward))
    path, batch = SAVED[way](tmp_path) if way in SAVED else qwen3, CUT
    if way == "images":
        batch = image_batch(path, MIXED, max_token_len_per_gpu=60)
    elif way == "compiled":
        batch = make_batch(SAMPLES)  # of one size: torch takes three times as long for graphs of any
    elif way == "padded groups":
        batch = make_batch(SAMPLES, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    elif way.startswith("split"):
        batch = make_batch(trie(), max_token_len_per_gpu=56)
    results = []
    engine = make_engine(path, **WAYS.get(way, {}))
    copier = watched(engine)
    with splitting(engine) if way.startswith("split") else nullcontext():
        for level in (Level.ALL, Level.INPUTS, *KEEPING):
            copier.copies.clear()
            results.append(update_at(level, engine, batch))
            out, back = copier.copies["out"], copier.copies["back"]  # what the last layer keeps stays there
            assert bool(out) == (out > back > 0) == level.on_host
    assert same_bits(results)
    if way in ("fsdp2", "fsdp", "compiled", "padded groups"):
        assert_same(results[0], run_reference(qwen3, batch))


def run_two_ranks(rank: int, path: str) -> None:
    """Ranks that share tokens, and ranks of which each has a level of its own."""
    mine = KEEPING if rank else KEEPING[::-1]
    for size in (1, 2):
        samples = SAMPLES if size == 2 or rank else SAMPLES[::-1]
        batch = make_batch(samples, max_token_len_per_gpu=40)
        engine = make_engine(path, engine={"ulysses_sequence_parallel_size": size})
        copier = watched(engine)
        with patch.object(activations, "SMALLEST", 1):
            results = [update_at(level, engine, batch) for level in (Level.ALL, *(KEEPING if size == 2 else mine))]
        assert copier.copies["out"] > copier.copies["back"] > 0
        assert same_bits(results), f"Ulysses size {size}"


def test_two_ranks_agree_at_levels_that_are_alike_and_at_others(qwen3: str) -> None:
    on_ranks(2, run_two_ranks, qwen3)


def recording(engine: Any, hook: Callable[[str], None]) -> None:
    """Call ``hook`` in front of every forward and backward of the engine's attention kernel."""
    kernel = engine.kernel

    def wrapped(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            hook(name)
            return getattr(kernel, name)(*args, **kwargs)

        return run

    engine.kernel = replace(kernel, forward=wrapped("forward"), backward=wrapped("backward"))


def test_attention_runs_as_often_as_asked_also_where_a_layer_attends_twice(tmp_path: Path) -> None:
    """LongCat Flash, with values as wide as keys."""
    path = save_causal(tmp_path, "longcat_flash", v_head_dim=24)
    batch = make_batch(SAMPLES)
    engine = make_engine(path)
    calls: Counter[str] = Counter()
    results = []
    recording(engine, lambda name: calls.update([name]))
    infer(engine, batch)
    once = calls["forward"]
    for level in Level:
        calls.clear()
        results.append(update_at(level, engine, batch))
        assert calls["forward"] == once * (1 if level is Level.ALL or level.keeps_attention else 2) > 0
    assert same_bits(results)
    assert_same(results[0], run_reference(path, batch))


def test_auto_takes_what_fits_on_the_device_and_on_the_host_and_says_so(qwen3: str, monkeypatch, caplog) -> None:
    """On a GPU that is made up: levels of the micro-batches, and the same bits."""
    monkeypatch.setattr(engine_module, "host_bytes", lambda: 1e12)
    engine, splits = make_engine(qwen3), make_engine(qwen3, splits=True)
    results = [update_at("auto", engine, CUT)]
    monkeypatch.setattr(engine_module, "get_device_name", lambda: "cuda")
    sizes = engine._token_bytes
    for device, host, level in (
        (1e9, 1e9, "attention"),
        (40 * (sizes.on_device(Level.ATTENTION) - 1), 1e9, "attention_on_host"),
        (40 * (sizes.on_device(Level.ATTENTION_ON_HOST) - 1), 1e9, "inputs_on_host"),
        (40 * (sizes.on_device(Level.ATTENTION) - 1), 0.0, "inputs"),
    ):
        monkeypatch.setattr(
            engine_module, "memory_budget_of_rank", lambda *_, given=(device, host): MemoryBudget(*given)
        )
        engine._logged_level = False
        assert level in {p.level.value for p in engine.plan(CUT.copy(), forward_only=False).micro_batches}
        assert caplog.messages[-1].startswith(f"activations: {level} for ")
        results.append(update_at("auto", engine, CUT))
    assert same_bits(results)
    monkeypatch.setattr(engine_module, "memory_budget_of_rank", lambda *_: MemoryBudget(1.0, 0.0))
    choose = Mock(return_value=Level.ATTENTION)
    monkeypatch.setattr(ActivationPolicy, "choose", choose)
    plan = splits.plan(make_batch(trie(), max_token_len_per_gpu=56), forward_only=False)
    of_each = [call(p.layout.num_tokens, len(p.layout.head_index), **p.layout.cache_use) for p in plan.micro_batches]
    assert (choose.call_args_list, plan.num_split_groups > 0) == (of_each, True)


def test_what_fsdp2_itself_offloads_is_taken_from_the_host_once(qwen3: str, monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "host_bytes", lambda: 1e12)
    asked = {"offload_policy": True}, {"offload_policy": True, "param_offload": True, "optimizer_offload": True}
    alone, both = (make_engine(qwen3, engine=engine)._host_bytes for engine in asked)
    assert both == alone < 1e12


def test_the_log_tells_what_was_asked_from_what_a_model_or_a_setting_leaves(qwen3: str, monkeypatch, caplog) -> None:
    def told(**settings: Any) -> str:
        make_engine(qwen3, **settings).plan(CUT.copy(), forward_only=False)
        return caplog.messages[-1]

    assert told(engine={"activations": "inputs"}).endswith("(as configured)")
    assert told(model={"enable_gradient_checkpointing": False}).endswith("(without gradient checkpointing)")
    monkeypatch.setattr(engine_module, "decoder_layers", lambda module: [])
    assert told().endswith("(by the model's own checkpoints)")
    whole, fused = make_engine(qwen3, engine={"logits_chunk_size": 0}), make_engine(qwen3, model=FUSED_HEAD)
    found = [
        engine._activation_policy(forward_only=True).logits_at_once for engine in (make_engine(qwen3), whole, fused)
    ]
    assert found == [False, True, False]


def test_a_transformers_that_calls_its_checkpoint_otherwise_is_an_error_and_no_other_level(qwen3, monkeypatch) -> None:
    stock = PreTrainedModel._set_gradient_checkpointing

    def renamed(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        for part in self.modules():
            vars(part).pop("_gradient_checkpointing_func", None)

    monkeypatch.setattr(PreTrainedModel, "_set_gradient_checkpointing", renamed)
    with pytest.raises(UpstreamChangedError, match="sets no _gradient_checkpointing_func"):
        make_engine(qwen3)


def test_activation_offload_of_verl_is_a_level_of_ours(qwen3: str) -> None:
    """And verify mode, whose forwards verl's own offload would count, runs beside it."""
    engine = make_engine(qwen3, model={"enable_activation_offload": True}, engine={"verify": "every_1"})
    copier = watched(engine)
    got = update_at("auto", engine, CUT)
    assert copier.copies["out"] > 0
    assert_same(got, run_reference(qwen3, CUT))


@pytest.mark.parametrize("level", KEEPING)
def test_nothing_outlives_an_update_without_the_garbage_collector(qwen3: str, level: Level, monkeypatch) -> None:
    engine = make_engine(qwen3)
    calls = []
    begin = activations.CheckpointRecord.__init__

    def remember(call: Any, *args: Any) -> None:
        begin(call, *args)
        calls.append(weakref.ref(call))

    monkeypatch.setattr(activations.CheckpointRecord, "__init__", remember)
    gc.disable()
    try:
        update_at(level, engine, make_batch(SAMPLES))
        assert len(calls) == LAYERS
        assert not any(call() for call in calls)
    finally:
        gc.enable()


def test_an_update_behind_one_that_failed_in_a_layer_is_exact(qwen3: str) -> None:
    engine, batch = make_engine(qwen3), make_batch(SAMPLES)
    kernel = engine.kernel
    calls = []

    def fail(name: str) -> None:
        calls.append(name)
        if len(calls) == 2:  # in the forward of the second layer
            raise ZeroDivisionError

    recording(engine, fail)
    for level in KEEPING:
        calls.clear()
        with pytest.raises(ZeroDivisionError):
            update_at(level, engine, batch)
    engine.kernel = kernel
    assert_same(update_at(Level.ATTENTION_ON_HOST, engine, batch), run_reference(qwen3, batch))


def test_under_lora_gradients_and_optimizer_are_those_of_adapters(qwen3: str) -> None:
    """Else GiB of the host and of the device are kept for nothing."""
    engine = make_engine(qwen3, model=LORA)
    trained = sum(weight.numel() for weight in engine.module.parameters() if weight.requires_grad)
    found, whole = engine._weight_bytes, make_engine(qwen3)._weight_bytes
    assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)
    assert found.weights > whole.weights > 3 * found.gradients
    assert whole.head - found.head == 4 * engine.module.get_output_embeddings().weight.numel()
    assert whole.gathered > found.gathered, "buffers of gradients"


def test_layers_that_fsdp2_keeps_whole_until_their_backward_are_counted_once(qwen3: str, monkeypatch) -> None:
    """Also where a forward alone has left them whole."""
    engine = make_engine(qwen3, engine={"reshard_after_forward": False})
    seen = []
    count = Mock(wraps=WeightBytes.of)
    monkeypatch.setattr(WeightBytes, "of", count)
    assert engine._weight_bytes.gathered > make_engine(qwen3)._weight_bytes.gathered
    assert count.call_args.kwargs == {"keeps_weights": False, "keeps_gradients": True}
    infer(engine, CUT)
    monkeypatch.setattr(engine_module, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(
        engine_module,
        "memory_budget_of_rank",
        lambda module, *_: seen.extend(module.parameters()) or MemoryBudget(1, 1),
    )
    engine._activation_policy(forward_only=False)
    assert {hasattr(weight, "_local_tensor") for weight in seen} == {True}


def test_a_critic_counts_no_logits(value_model: str) -> None:
    engine = make_engine(value_model, critic=True)
    assert engine._token_bytes.logits == engine._weight_bytes.head == 0
