"""One Gated DeltaNet layer over a trie is that layer over every sequence alone, in float64."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.tries import Batch, batches, sequence_rows
from tests.mixers.hybrids import KINDS, SIZES, build_hybrid, delta_layer, depth_of, stretched, trie_of_depth
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.mixers import delta_layer as layer_file
from verl_pg_plugin.mixers.delta_layer import GATED_DELTA, GatedDeltaLayer, Windows, install

Found = dict[str, torch.Tensor]
PADDING = 3


def shared_layer(kind: str) -> Callable[[PackedAttention, torch.Tensor], torch.Tensor]:
    """A layer that takes packed rows, (1, T, E) -> (1, T, E)."""
    model = build_hybrid(kind)
    assert install(model) == 3
    module = delta_layer(model)
    ops = module.chunk_gated_delta_rule.__self__
    assert isinstance(ops, GatedDeltaLayer)

    def run(rows: PackedAttention, hidden: torch.Tensor) -> torch.Tensor:
        ops.enter_layer(module, (), {"prefix_grouper": rows})
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
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_every_sequence_alone(kind: str, depth: int) -> None:
    batch = trie_of_depth(depth)
    assert depth_of(batch.layout()) == depth
    assert max(errors(kind, batch).values()) <= 1e-10


@settings(max_examples=10)
@given(batches(max_sequences=6), st.sampled_from([1, 1, 5, 40]))
def test_any_trie_is_exact(batch: Batch, times: int) -> None:
    assert max(errors("qwen3_5_text", stretched(batch, times)).values()) <= 1e-10


@pytest.mark.parametrize("depth", [2, 4])
def test_without_the_state_handed_down_nothing_is_right(depth: int) -> None:
    def forget(state: torch.Tensor, num_children: torch.Tensor, total: int) -> torch.Tensor:
        return state.new_zeros(total, *state.shape[1:])

    with patch.object(layer_file._HandDown, "apply", forget):
        found = errors("qwen3_next", trie_of_depth(depth))
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
    model = build_hybrid("qwen3_next")
    install(model)
    with pytest.raises(RuntimeError, match="got no layout"):
        delta_layer(model)(torch.zeros(1, 4, SIZES["hidden_size"], dtype=torch.float64))


def test_a_layer_that_convolves_by_other_means_is_an_error_and_not_a_wrong_number() -> None:
    shared, layout = shared_layer("qwen3_next"), trie_of_depth(2).layout()
    shared.module.causal_conv1d_fn = None  # transformers then calls the module's own convolution
    rows = PackedAttention(layout, select_kernel("sdpa", "cpu"), "cpu")
    with pytest.raises(RuntimeError, match="by other means"):
        shared(rows, torch.zeros(1, layout.num_tokens, SIZES["hidden_size"], dtype=torch.float64))
