"""Updates whose attention copies keys in its forward alone are those of every sequence alone.

flash-attn's passes need a GPU; those written out stand in for them.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.engine.carried_cases import carrying, carrying_engine
from tests.engine.test_saved_attention import CountForwards
from tests.modalities.picture_cases import MIXED
from tests.modalities.tiny_vision import KINDS, load, picture_batch, save_vision_model
from tests.support import actor_loss, assert_same, clone, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.attention import key_copies
from verl_pg_plugin.attention.kernels import KERNELS, flash_passes
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group", "passes")

LAYERS, OF_TOWERS = 3, KERNELS["sdpa"].saved_ops
SHORT = [*group(40, [3, 2] * 8, 1), *group(30, [2, 3] * 6, 2)]
LONG = [*group(7, [6, 4], 2), *group(5, [9], 3)]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=LAYERS)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts backwards by their kind."""
    spec = replace(
        KERNELS["sdpa"],
        module="tests.attention.kernels.reference_passes",
        saved_ops=("verl_pg_plugin::reference_forward",),
        narrow_values=False,
    )
    monkeypatch.setitem(KERNELS, "sdpa", spec)
    calls: Counter[str] = Counter()

    def count(name: str, run: Any) -> None:
        def counted(*args: Any) -> Any:
            calls[name] += 1
            return run(*args)

        monkeypatch.setattr(flash_passes, name, counted)

    count("_copied", flash_passes._copied)
    count("_without_trunks", flash_passes._without_trunks)
    return calls


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compile_layers": True},
        {"compile_layers": True, "static_rows": True},
        {"compile_layers": True, "keep_activations": "all"},
        {"keep_activations": "mlp"},
        {"recompute_attention": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("samples", "apart"), [(SHORT, True), (LONG, False)], ids=["many short responses", "few"])
def test_updates_are_those_of_every_sequence_alone(
    qwen3: str, passes: Counter[str], samples: list, apart: bool, options: dict
) -> None:
    engine = make_engine(qwen3, packed=True, engine=options)
    batch = make_batch(samples, max_token_len_per_gpu=160)
    assert_same(run_engine(engine, clone(batch), actor_loss()), run_reference(qwen3, batch, actor_loss()))
    assert passes["_copied"] >= LAYERS
    assert passes["_without_trunks"] == apart * passes["_copied"], "once for each layer and micro-batch"


@pytest.mark.parametrize("budget", [48, 64])
@pytest.mark.parametrize("compile_layers", [False, True])
def test_carried_parts_are_exact_too(qwen3: str, budget: int, compile_layers: bool) -> None:
    engine = carrying_engine(qwen3, engine={"compile_layers": compile_layers})
    batch = make_batch(SHORT, max_token_len_per_gpu=budget)
    with carrying(engine):
        assert_same(run_engine(engine, clone(batch), actor_loss()), run_reference(qwen3, batch, actor_loss()))


def test_log_probs_prepare_no_backward(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Telling reads of trunks apart takes the host as long as laying the rows out."""
    read, calls = key_copies.read_trunks, []

    def counted(layout: PackedLayout) -> Any:
        calls.append(layout)
        return read(layout)

    monkeypatch.setattr(key_copies, "read_trunks", counted)
    engine, batch = make_engine(qwen3, packed=True), make_batch(SHORT, max_token_len_per_gpu=160)
    with engine.eval_mode():
        engine.infer_batch(clone(batch))
    assert calls == []
    with engine.train_mode():
        engine.forward_backward_batch(clone(batch), actor_loss())
    assert len(calls) > 0


def test_a_chat_template_in_front_of_all_prompts_changes_nothing(qwen3: str, passes: Counter[str]) -> None:
    engine, template = make_engine(qwen3, packed=True), [90, 91, 92, 93, 94]
    batch = make_batch(
        [replace(sample, prompt=[*template, *sample.prompt]) for sample in SHORT], max_token_len_per_gpu=160
    )
    assert_same(run_engine(engine, clone(batch), actor_loss()), run_reference(qwen3, batch, actor_loss()))
    assert passes["_without_trunks"] == passes["_copied"] > 0


def test_towers_keep_their_attention_whatever_kernel_the_text_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They attend as transformers does, here with torch's attention, and not with the kernel of shared rows."""
    monkeypatch.setitem(KERNELS, "torch_varlen", replace(KERNELS["torch_varlen"], saved_ops=OF_TOWERS))
    path = save_vision_model(tmp_path, KINDS[0])
    batch, calls = picture_batch(load(path), MIXED), []
    for recompute in (False, True):
        engine = make_engine(path, packed=True, engine={"recompute_attention": recompute})
        with engine.train_mode(), CountForwards(OF_TOWERS) as tower:
            engine.forward_backward_batch(clone(batch), actor_loss())
        calls.append(tower.calls)
    assert 0 < 2 * calls[0] == calls[1]


def test_layers_compiled_for_any_number_of_rows_take_gradients_as_they_are(qwen3: str) -> None:
    """torch copies those that lie otherwise than it expects: two thirds of a percent of an update on an H200."""
    engine = make_engine(qwen3, packed=True, engine={"compile_layers": True})
    for _ in range(2):
        with engine.train_mode(), profile(activities=[ProfilerActivity.CPU]) as profiler:
            engine.forward_backward_batch(make_batch(SHORT, max_token_len_per_gpu=160), actor_loss())
            engine.optimizer_zero_grad()
    backwards = [event for event in profiler.events() if event.name == "CompiledFunctionBackward"]
    assert backwards
    assert not [child.name for event in backwards for child in event.cpu_children if child.name == "aten::contiguous"]
