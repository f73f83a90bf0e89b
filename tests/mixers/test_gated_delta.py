"""Gated DeltaNet layers, and models with them, over a prefix tree are those over every sequence alone, in float64."""

import importlib
import subprocess
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from tests.layout.tries import Batch, batches, sequence_rows
from tests.mixers.hybrids import (
    KINDS,
    SIZES,
    build_hybrid,
    delta_layer,
    depth_of,
    modeling_file,
    stretched,
    trie_of_depth,
)
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.interface import ATTENTION, ATTENTION_NAME, register_attention
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.mixers import delta_layer as layer_file
from verl_pg_plugin.mixers import gated_delta as kernels
from verl_pg_plugin.mixers.delta_layer import CONVOLUTION, GATED_DELTA, Windows, install

Found = dict[str, torch.Tensor]
PADDING = 3


def shared_layer(kind: str) -> Callable[[PackedAttention, torch.Tensor], torch.Tensor]:
    """A layer that takes packed rows, (1, T, E) -> (1, T, E)."""
    model = build_hybrid(kind)
    assert install(model) == 3
    module = delta_layer(model)

    def run(rows: PackedAttention, hidden: torch.Tensor) -> torch.Tensor:
        if not hasattr(module, CONVOLUTION):  # transformers 5.15 and later
            return module(hidden, prefix_grouper=rows)
        module.chunk_gated_delta_rule.__self__.enter_layer(module, (), {"prefix_grouper": rows})
        return module(hidden)

    run.module = module
    return run


def errors(kind: str, batch: Batch) -> dict[str, float]:
    """Largest error of the outputs and of every gradient, relative to the largest number there is."""
    stock, shared, layout = delta_layer(build_hybrid(kind)), shared_layer(kind), batch.layout()
    generator = torch.Generator().manual_seed(3)
    x_TE, weight_TE = (
        torch.randn(layout.num_tokens, SIZES["hidden_size"], generator=generator, dtype=torch.float64) for _ in range(2)
    )
    x_TE.requires_grad_()
    rows = [sequence_rows(layout, sequence) for sequence in batch.sequences]
    readers_T1 = torch.zeros(layout.num_tokens, 1, dtype=torch.float64)
    for path in rows:
        readers_T1[path] += 1

    packed = PackedAttention(layout, select_kernel("sdpa", "cpu"), "cpu")
    out_TE = shared(packed, F.pad(x_TE, (0, 0, 0, PADDING)).unsqueeze(0))[0]
    assert packed.calls == {GATED_DELTA: 1}
    assert (out_TE[layout.num_tokens :] == 0).all(), "padding rows are not zero"
    out_TE = out_TE[: layout.num_tokens]
    (out_TE * weight_TE * readers_T1).sum().backward()
    got = {name: w.grad for name, w in shared.module.named_parameters()} | {"input": x_TE.grad}

    x_TE.grad = None
    alone = [stock(x_TE[path].unsqueeze(0))[0] for path in rows]
    torch.stack([(out * weight_TE[path]).sum() for out, path in zip(alone, rows, strict=True)]).sum().backward()
    want = {name: w.grad for name, w in stock.named_parameters()} | {"input": x_TE.grad}

    found = {name: relative(got[name], want[name]) for name in want}
    found["output"] = max(relative(out_TE[path], out) for path, out in zip(rows, alone, strict=True))
    return found


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """A sequence of one row has nothing to forget: some gradients are zero, and held to an absolute error."""
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-3)).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 4])
def test_outputs_and_gradients_are_those_of_every_sequence_alone(kind: str, depth: int) -> None:
    batch = trie_of_depth(depth)
    assert depth_of(batch.layout()) == depth
    assert max(errors(kind, batch).values()) <= 1e-10


@settings(max_examples=10)
@given(batches(max_sequences=6), st.sampled_from([1, 1, 5, 40]))
def test_any_trie_is_exact(batch: Batch, times: int) -> None:
    assert max(errors("qwen3_5_text", stretched(batch, times)).values()) <= 1e-10


def forget(state: torch.Tensor, num_children: torch.Tensor, total: int) -> torch.Tensor:
    return state.new_zeros(total, *state.shape[1:])


def test_without_the_state_handed_down_nothing_is_right() -> None:
    with patch.object(layer_file._HandDown, "apply", forget):
        found = errors("qwen3_next", trie_of_depth(4))
    assert found["output"] > 1e-2
    assert found["A_log"] > 1e-2


def test_without_the_ancestors_in_the_windows_nothing_is_right() -> None:
    stock = Windows.from_layout

    def forget(*args) -> Windows:
        windows = stock(*args)
        windows.missing[:, : windows.missing.shape[1] // 2] = True
        return windows

    with patch.object(Windows, "from_layout", forget):
        assert errors("qwen3_next", trie_of_depth(2))["output"] > 1e-2


def test_a_layer_that_is_given_no_rows_says_so() -> None:
    shared = shared_layer("qwen3_next")
    rows = PackedAttention(None, select_kernel("sdpa", "cpu"), "cpu")
    with pytest.raises(RuntimeError, match="got no layout"):
        shared(rows, torch.zeros(1, 4, SIZES["hidden_size"], dtype=torch.float64))


def test_a_layer_that_convolves_by_other_means_is_an_error_and_not_a_wrong_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, layout = shared_layer("qwen3_next"), trie_of_depth(2).layout()
    if hasattr(shared.module, CONVOLUTION):
        shared.module.causal_conv1d_fn = None  # transformers then calls the module's own convolution
    else:
        monkeypatch.setattr(modeling_file("qwen3_next", torch.float64), CONVOLUTION, lambda x, *_, **__: x)
    rows = PackedAttention(layout, select_kernel("sdpa", "cpu"), "cpu")
    with pytest.raises(RuntimeError, match="by other means"):
        shared(rows, torch.zeros(1, layout.num_tokens, SIZES["hidden_size"], dtype=torch.float64))


def over_the_tree(kind: str, batch: Batch, checkpointing: bool = False, dtype: torch.dtype = torch.float64) -> Found:
    """Log-probs of every sequence's responses one after the other, and every gradient of their weighted sum."""
    register_attention()
    model = build_hybrid(kind, dtype, ATTENTION_NAME)
    install(model)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layout = batch.layout()
    rows = PackedAttention(layout, select_kernel("sdpa", "cpu"), "cpu")
    head_index = torch.from_numpy(layout.head_index)
    logits = model(
        input_ids=torch.from_numpy(layout.input_ids).unsqueeze(0),
        position_ids=torch.from_numpy(layout.position_ids).unsqueeze(0),
        use_cache=False,
        prefix_grouper=rows,
        logits_to_keep=head_index,
    ).logits.squeeze(0)
    assert rows.calls == {GATED_DELTA: 3, ATTENTION: 1}
    of_heads = log_probs(logits, torch.from_numpy(layout.labels)[head_index])
    flat = torch.zeros(layout.num_logical_tokens, dtype=dtype).index_copy(
        0, torch.from_numpy(layout.response_index), of_heads[torch.from_numpy(layout.response_head)]
    )
    bounds = zip(batch.offsets.tolist(), batch.prompt_lengths, batch.offsets[1:].tolist(), strict=False)
    return gradients_of(model, torch.cat([flat[start + prompt - 1 : stop - 1] for start, prompt, stop in bounds]))


def alone(kind: str, batch: Batch) -> Found:
    model = build_hybrid(kind)
    found = []
    for sequence, prompt in zip(batch.sequences, batch.prompt_lengths, strict=True):
        ids = torch.tensor(sequence)
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, prompt - 1 : -1]
        found.append(log_probs(logits, ids[prompt:]))
    return gradients_of(model, torch.cat(found))


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def gradients_of(model: torch.nn.Module, found: torch.Tensor) -> Found:
    weights = torch.randn(len(found), generator=torch.Generator().manual_seed(5)).to(found)
    (found * weights).sum().backward()
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None} | {"log_probs": found.detach()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_log_probs_and_gradients_are_those_of_every_sequence_alone(kind: str, depth: int) -> None:
    batch = trie_of_depth(depth)
    got, want = over_the_tree(kind, batch), alone(kind, batch)
    assert got.keys() == want.keys()
    assert max(relative(got[name], want[name]) for name in want) <= 1e-10


def test_gradient_checkpointing_changes_no_bit() -> None:
    batch = trie_of_depth(3)
    kept, again = (over_the_tree("qwen3_next", batch, checkpointing, torch.float32) for checkpointing in (False, True))
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_the_float64_copy_of_a_modeling_file_is_that_file(kind: str) -> None:
    """In float32 the original, with the same weights, is as close as float32 gets."""
    ids = torch.tensor([trie_of_depth(2).sequences[-1]])
    double, single = (build_hybrid(kind, dtype)(ids, use_cache=False) for dtype in (torch.float64, torch.float32))
    assert relative(single.logits.double(), double.logits) <= 1e-5
    copy, stock = modeling_file(kind, torch.float64), modeling_file(kind, torch.float32)
    assert copy is not stock
    assert stock is importlib.import_module(stock.__name__)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A GPU machine: its generations, its Triton, and the packages that it has."""

    def make(generations: set[int], triton: str | None, *packages: str) -> None:
        monkeypatch.setattr(kernels, "gpu_generations", lambda: frozenset(generations))
        monkeypatch.setattr(kernels, "find_spec", lambda name: object() if name in packages else None)
        monkeypatch.setattr(kernels, "_installed", lambda name: Version(triton) if triton else None)

    return make


@pytest.mark.parametrize("triton", ["3.4.0", "3.7.0"])
def test_triton_with_a_wrong_backward_on_hopper_is_refused(machine, triton: str) -> None:
    machine({9}, triton, "fla")
    (reason,) = kernels.kernel_obstacles("cuda")
    assert "wrong on Hopper" in reason
    assert triton in reason
    assert "triton>=3.7.1" in reason


@pytest.mark.parametrize(
    ("generations", "triton", "packages"),
    [
        ({9}, "3.3.1", ("fla",)),
        ({9}, "3.7.1", ("fla",)),
        ({9}, "3.6.0", ("fla", "tilelang")),
        ({8}, "3.6.0", ("fla",)),
        ({10}, "3.6.0", ("fla",)),
        (set(), "3.6.0", ("fla",)),
    ],
    ids=["before the fault", "mended", "by tilelang", "ampere", "blackwell", "no GPU here"],
)
def test_other_machines_are_not(machine, generations: set[int], triton: str, packages: tuple[str, ...]) -> None:
    machine(generations, triton, *packages)
    assert kernels.kernel_obstacles("cuda") == []


def test_a_gpu_without_fla_is_refused_and_a_cpu_needs_nothing(machine) -> None:
    machine({9}, "3.7.1")
    (reason,) = kernels.kernel_obstacles("cuda")
    assert reason.endswith("not installed: pip install fla-core")
    assert kernels.kernel_obstacles("cpu") == []


def test_generations_are_what_nvidia_smi_says_or_torch_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, stdout="8.6\n12.0\n")
    monkeypatch.setattr(kernels.subprocess, "run", lambda *args, **kwargs: done)
    monkeypatch.setattr(kernels.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(kernels.torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(kernels.shutil, "which", lambda name: name)
    assert kernels.gpu_generations() == {8, 12}
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    assert kernels.gpu_generations() == {9}
