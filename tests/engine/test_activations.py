"""Activation levels change no bit of any gradient, and saved tensors are freed with their graph."""

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

LAYERS = 3
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
    """Copies in ``wait`` and not before: a read without a wait gets NaN."""

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
    """Overwrite released device memory with NaN."""
    leave = activations.CheckpointRecord.leave_device

    def leave_nothing(call: Any) -> None:
        left = [copy.x for copy in call._copies]
        leave(call)
        for x in left:
            x.fill_(torch.nan)

    monkeypatch.setattr(activations.CheckpointRecord, "leave_device", leave_nothing)


def update_at(level: Level | str, engine: Any, batch: TensorDict) -> Result:
    engine._copier = engine._copier or LateCopier()
    engine.options = replace(engine.options, activations=getattr(level, "value", level))
    return update(engine, batch, return_model_output=True)


def same_bits(results: list[Result]) -> bool:
    first, *others = (result.gradients for result in results)
    assert first, "no gradient"
    return all(x.keys() == first.keys() and all(torch.equal(x[n], first[n]) for n in first) for x in others)


WAYS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp": {"strategy": "fsdp", "engine": {"use_orig_params": True}},
    "LoRA": {"model": LORA},
    "compiled": {"engine": {"compile_layers": True}},
    "padded groups": {"padded": True},
    "split groups": {"splits": True, "engine": BF16},
}
SAVED: dict[str, Callable[[Path], str]] = {
    "experts": lambda folder: save_causal(folder, "qwen3_moe"),
    "layers without attention": save_hybrid,  # they keep their inputs at every level
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
        batch = make_batch(SAMPLES)  # one size: dynamic graphs compile three times as long
    elif way == "padded groups":
        batch = make_batch(SAMPLES, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    elif way == "split groups":
        batch = make_batch(trie(), max_token_len_per_gpu=56)
    results = []
    engine = make_engine(path, **WAYS.get(way, {}))
    copier = engine._copier = LateCopier()
    with splitting(engine) if way == "split groups" else nullcontext():
        for level in (Level.ALL, Level.INPUTS, *KEEPING):
            copier.copies.clear()
            results.append(update_at(level, engine, batch))
            out, back = copier.copies["out"], copier.copies["back"]  # the last layer's tensors stay on the device
            assert bool(out) == (out > back > 0) == level.on_host
    assert same_bits(results)
    if way in ("fsdp2", "fsdp", "compiled", "padded groups"):
        assert_same(results[0], run_reference(qwen3, batch))


def run_two_ranks(rank: int, path: str) -> None:
    """Ranks of one Ulysses group use the same level; data-parallel ranks use different levels."""
    for size in (1, 2):
        reverse = -1 if size == 1 and rank == 0 else 1
        batch = make_batch(SAMPLES[::reverse], max_token_len_per_gpu=40)
        engine = make_engine(path, engine={"ulysses_sequence_parallel_size": size})
        engine._copier = LateCopier()
        with patch.object(activations, "SMALLEST", 1):
            results = [update_at(level, engine, batch) for level in (Level.ALL, *KEEPING[::reverse])]
        assert engine._copier.copies["out"] > engine._copier.copies["back"] > 0
        assert same_bits(results), f"Ulysses size {size}"


def test_two_ranks_agree_at_equal_and_at_different_levels(qwen3: str) -> None:
    on_ranks(2, run_two_ranks, qwen3)


def recording(engine: Any, hook: Callable[[str], None]) -> None:
    """Call ``hook`` before every forward and backward of the engine's attention kernel."""
    kernel = engine.kernel

    def run(name: str, *args: Any, **kwargs: Any) -> Any:
        hook(name)
        return getattr(kernel, name)(*args, **kwargs)

    engine.kernel = replace(kernel, forward=partial(run, "forward"), backward=partial(run, "backward"))


def test_number_of_attention_calls_by_level_with_two_attentions_per_layer(tmp_path: Path) -> None:
    """LongCat Flash, with values as wide as keys."""
    path = save_causal(tmp_path, "longcat_flash", v_head_dim=24)
    engine, batch, calls, results = make_engine(path), make_batch(SAMPLES), Counter(), []
    recording(engine, lambda name: calls.update([name]))
    infer(engine, batch)
    once = calls["forward"]
    for level in Level:
        calls.clear()
        results.append(update_at(level, engine, batch))
        assert calls["forward"] == once * (1 if level is Level.ALL or level.keeps_attention else 2) > 0
    assert same_bits(results)
    assert_same(results[0], run_reference(path, batch))


def test_auto_selects_and_logs_the_level_that_fits_device_and_host(qwen3: str, monkeypatch, caplog) -> None:
    """On a patched GPU: levels of the micro-batches, and the same bits."""
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
        budget = MemoryBudget(device, host)
        monkeypatch.setattr(engine_module, "memory_budget_of_rank", Mock(return_value=budget))
        engine._logged_level = False
        assert level in {p.level.value for p in engine.plan(CUT.copy(), forward_only=False).micro_batches}
        assert caplog.messages[-1].startswith(f"activations: {level} for ")
        results.append(update_at("auto", engine, CUT))
    assert same_bits(results)
    choose = Mock(return_value=Level.ATTENTION)
    monkeypatch.setattr(ActivationPolicy, "choose", choose)
    plan = splits.plan(make_batch(trie(), max_token_len_per_gpu=56), forward_only=False)
    of_each = [call(p.layout.num_tokens, len(p.layout.head_index), **p.layout.cache_use) for p in plan.micro_batches]
    assert (choose.call_args_list, plan.num_split_groups > 0) == (of_each, True)


def test_weights_that_fsdp2_offloads_are_counted_once_on_the_host(qwen3: str, monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "host_bytes", lambda: 1e12)
    policy = {"offload_policy": True}
    options = policy, policy | {"param_offload": True, "optimizer_offload": True}
    alone, both = (make_engine(qwen3, engine=engine)._host_bytes for engine in options)
    assert both == alone < 1e12


def test_logits_are_counted_at_once_only_for_a_whole_head_and_never_for_a_critic(qwen3: str, value_model: str) -> None:
    heads = {"chunks": {}, "whole": {"engine": {"logits_chunk_size": 0}}, "fused": {"model": FUSED_HEAD}}
    policies = {head: make_engine(qwen3, **of)._activation_policy(forward_only=True) for head, of in heads.items()}
    assert [head for head, policy in policies.items() if policy.logits_at_once] == ["whole"]
    critic = make_engine(value_model, critic=True)
    assert critic._token_bytes.logits == critic._weight_bytes.head == 0


def test_a_renamed_checkpoint_function_in_transformers_is_an_error(qwen3, monkeypatch) -> None:
    stock = PreTrainedModel._set_gradient_checkpointing

    def renamed(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        for part in self.modules():
            vars(part).pop("_gradient_checkpointing_func", None)

    monkeypatch.setattr(PreTrainedModel, "_set_gradient_checkpointing", renamed)
    with pytest.raises(UpstreamChangedError, match="sets no _gradient_checkpointing_func"):
        make_engine(qwen3)


def test_activation_offload_of_verl_uses_a_level_of_the_plugin(qwen3: str) -> None:
    """In verify mode, whose forwards verl's own offload would count."""
    engine = make_engine(qwen3, model={"enable_activation_offload": True}, engine={"verify": "every_1"})
    engine._copier = LateCopier()
    assert_same(update_at("auto", engine, CUT), run_reference(qwen3, CUT))
    assert engine._copier.copies["out"] > 0


@pytest.mark.parametrize("level", KEEPING)
def test_checkpoint_records_are_freed_without_the_garbage_collector(qwen3: str, level: Level, monkeypatch) -> None:
    engine, calls, init = make_engine(qwen3), [], activations.CheckpointRecord.__init__

    def remember(call: Any, *args: Any) -> None:
        init(call, *args)
        calls.append(weakref.ref(call))

    monkeypatch.setattr(activations.CheckpointRecord, "__init__", remember)
    gc.disable()
    try:
        update_at(level, engine, make_batch(SAMPLES))
        assert len(calls) == LAYERS
        assert not any(call() for call in calls)
    finally:
        gc.enable()


def test_an_update_after_one_that_failed_in_a_layer_is_exact(qwen3: str) -> None:
    engine, batch, calls = make_engine(qwen3), make_batch(SAMPLES), []
    kernel = engine.kernel

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


def test_lora_counts_gradients_and_optimizer_of_adapters_only(qwen3: str) -> None:
    engine = make_engine(qwen3, model=LORA)
    trained = sum(weight.numel() for weight in engine.module.parameters() if weight.requires_grad)
    lora, whole = engine._weight_bytes, make_engine(qwen3)._weight_bytes
    assert (lora.gradients, lora.optimizer) == (4 * trained, 8 * trained)
    assert lora.weights > whole.weights > 3 * lora.gradients
    assert whole.head - lora.head == 4 * engine.module.get_output_embeddings().weight.numel()
    assert whole.gathered > lora.gathered, "gradient buffers"


def test_unsharded_layers_are_counted_once_also_after_inference(qwen3: str, monkeypatch) -> None:
    engine = make_engine(qwen3, engine={"reshard_after_forward": False})
    seen, count = [], Mock(wraps=WeightBytes.of)
    monkeypatch.setattr(WeightBytes, "of", count)
    assert engine._weight_bytes.gathered > make_engine(qwen3)._weight_bytes.gathered
    assert count.call_args.kwargs == {"keeps_weights": False, "keeps_gradients": True}
    infer(engine, CUT)
    monkeypatch.setattr(engine_module, "get_device_name", lambda: "cuda")

    def budget(module: torch.nn.Module, *_: Any) -> MemoryBudget:
        seen.extend(module.parameters())
        return MemoryBudget(1, 1)

    monkeypatch.setattr(engine_module, "memory_budget_of_rank", budget)
    engine._activation_policy(forward_only=False)
    assert {hasattr(weight, "_local_tensor") for weight in seen} == {True}
