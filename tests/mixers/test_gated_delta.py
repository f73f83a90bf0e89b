"""Models with Gated DeltaNet layers over a prefix tree are those over every sequence alone, in float64."""

import re
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.tries import Batch, batches
from tests.mixers.hybrids import KINDS, build_hybrid, modeling_file, stretched, trie_of_depth
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.interface import ATTENTION, ATTENTION_NAME, register_attention
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.mixers import gated_delta
from verl_pg_plugin.mixers.delta_layer import CONVOLUTION, GATED_DELTA, Windows, install

Found = dict[str, torch.Tensor]
PADDING = 3


def hybrid_over(batch: Batch, kind: str, dtype: torch.dtype = torch.float64):
    """A model whose layers mix packed tokens, and the tokens of a batch, with padding at the end."""
    register_attention()
    model = build_hybrid(kind, dtype, ATTENTION_NAME)
    install(model)
    layout = batch.layout()
    inputs = {
        "input_ids": F.pad(torch.from_numpy(layout.input_ids), (0, PADDING)).unsqueeze(0),
        "position_ids": F.pad(torch.from_numpy(layout.position_ids), (0, PADDING)).unsqueeze(0),
        "prefix_grouper": PackedAttention(layout, select_kernel("sdpa", "cpu")),
        "logits_to_keep": torch.from_numpy(layout.head_index),
        "use_cache": False,
    }
    return model, inputs


def over_the_tree(batch: Batch, kind: str, dtype: torch.dtype = torch.float64, checkpointing: bool = False) -> Found:
    """Log-probs of every sequence's responses one after the other, and every gradient of their weighted sum."""
    model, inputs = hybrid_over(batch, kind, dtype)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    context = inputs["prefix_grouper"]
    layout = context.layout
    logits = model(**inputs).logits.squeeze(0)
    assert context.calls == {GATED_DELTA: 3, ATTENTION: 1}
    of_heads = log_probs(logits, torch.from_numpy(layout.labels)[inputs["logits_to_keep"]])
    flat = torch.zeros(layout.num_logical_tokens, dtype=dtype).index_copy(
        0, torch.from_numpy(layout.response_index), of_heads[torch.from_numpy(layout.response_head)]
    )
    bounds = zip(batch.offsets.tolist(), batch.prompt_lengths, batch.offsets[1:].tolist(), strict=False)
    return gradients_of(model, torch.cat([flat[start + prompt - 1 : stop - 1] for start, prompt, stop in bounds]))


def alone(batch: Batch, kind: str) -> Found:
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


def worst(batch: Batch, kind: str) -> float:
    """Largest error, relative to the largest number of its tensor; what is nearly zero is held to an absolute error."""
    got, want = over_the_tree(batch, kind), alone(batch, kind)
    assert got.keys() == want.keys()
    return max(((got[n] - want[n]).abs().max() / want[n].abs().max().clamp(min=1e-3)).item() for n in want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 4])
def test_log_probs_and_gradients_are_those_of_every_sequence_alone(kind: str, depth: int) -> None:
    assert worst(trie_of_depth(depth), kind) <= 1e-10


@settings(max_examples=10)
@given(batches(max_sequences=6), st.sampled_from([1, 1, 5, 40]))
def test_any_trie_is_exact(batch: Batch, times: int) -> None:
    assert worst(stretched(batch, times), "qwen3_5_text") <= 1e-10


def test_without_the_ancestors_in_the_windows_nothing_is_right() -> None:
    stock = Windows.from_layout

    def forget(*args) -> Windows:
        windows = stock(*args)
        windows.missing[:, : windows.missing.shape[1] // 2] = True
        return windows

    with patch.object(Windows, "from_layout", forget):
        assert worst(trie_of_depth(2), "qwen3_next") > 1e-2


def test_gradient_checkpointing_changes_no_bit() -> None:
    kept, again = (over_the_tree(trie_of_depth(3), "qwen3_next", torch.float32, again) for again in (False, True))
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_a_layer_that_is_given_no_tokens_or_convolves_by_other_means_is_an_error_and_not_a_wrong_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = hybrid_over(trie_of_depth(2), "qwen3_next")
    of_no_tokens = PackedAttention(None, select_kernel("sdpa", "cpu"))
    with pytest.raises(RuntimeError, match="got no layout"):
        model(inputs["input_ids"], use_cache=False, prefix_grouper=of_no_tokens)
    # Since transformers 5.15 layers call a function of their file.
    monkeypatch.setattr(modeling_file("qwen3_next", torch.float64), CONVOLUTION, lambda x, *_, **__: x)
    for module in model.modules():
        if hasattr(module, CONVOLUTION):
            setattr(module, CONVOLUTION, None)  # transformers then calls the module's own convolution
    with pytest.raises(RuntimeError, match="by other means"):
        model(**inputs)


@pytest.mark.parametrize(
    ("generations", "triton", "packages", "refusal"),
    [
        ({9}, "3.4.0", {"fla"}, r"wrong on Hopper with Triton 3\.4 .*\(here 3\.4\.0\): pip install .*triton>=3\.7\.1"),
        ({9}, "3.7.0", {"fla"}, "wrong on Hopper"),
        ({9}, "3.3.1", {"fla"}, None),
        ({9}, "3.7.1", {"fla"}, None),
        ({9}, "3.6.0", {"fla", "tilelang"}, None),
        ({8, 10}, "3.6.0", {"fla"}, None),
        ({9}, "3.7.1", set(), "not installed: pip install fla-core$"),
    ],
    ids=["wrong", "wrong too", "before the fault", "mended", "tilelang", "other GPUs", "no fla"],
)
def test_machines_whose_backward_is_wrong_or_missing_are_refused(
    monkeypatch: pytest.MonkeyPatch, generations: set[int], triton: str, packages: set[str], refusal: str | None
) -> None:
    monkeypatch.setattr(gated_delta, "gpu_generations", lambda: generations)
    monkeypatch.setattr(gated_delta, "find_spec", lambda name: object() if name in packages else None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    found = gated_delta.kernel_obstacles("cuda")
    assert len(found) == (refusal is not None)
    assert all(re.search(refusal, why) for why in found)
    assert gated_delta.kernel_obstacles("cpu") == []


def test_generations_are_what_nvidia_smi_says_or_torch_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, stdout="8.6\n12.0\n")
    monkeypatch.setattr(gated_delta.subprocess, "run", lambda *args, **kwargs: done)
    monkeypatch.setattr(gated_delta.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(gated_delta.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gated_delta.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gated_delta.torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(gated_delta.shutil, "which", lambda name: name)
    assert gated_delta.gpu_generations() == {8, 12}
    monkeypatch.setattr(gated_delta.shutil, "which", lambda name: None)
    assert gated_delta.gpu_generations() == {9}
