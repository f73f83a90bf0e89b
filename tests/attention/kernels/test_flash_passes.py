"""A kernel's passes with copies in the forward alone equal attention of every sequence alone, in float64 to 1e-10."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.attention.dense import Outcome, Tensors, dense_outcome, random_tensors
from tests.attention.kernels import reference_passes
from tests.attention.test_packed_attention import GROUP, assert_equal
from tests.layout.tries import Batch, batch_of, batches
from verl_pg_plugin.attention.gather import GatherIndex
from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.attention.key_copies import Bounds, KeyCopies, WithoutTrunks
from verl_pg_plugin.attention.packed_rows import PackedRows
from verl_pg_plugin.attention.shared_rows import AttentionOptions
from verl_pg_plugin.engine.saved_attention import _policy
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.layout.trunk_reads import read_trunks

KERNEL = VarlenKernel("flash_attn_2", "", reference_passes.attend)
OPERATOR = "verl_pg_plugin::reference_forward"
TURN = (*range(40, 52), *range(60, 66))
PROMPT = TURN[:12]
TREE = batch_of(
    (PROMPT, range(1, 8)),
    (PROMPT, (9, 8)),
    (TURN, (20, 21, 22)),
    (TURN, (20, 30)),
    ((3, 4), (5, 6)),
)


def packed_rows(layout: PackedLayout, kernel: VarlenKernel = KERNEL, without_trunks: bool = True) -> PackedRows:
    """Rows whose backward does without copies of trunks, however few these are, or with all copies."""
    rows = PackedRows.from_layout(layout, kernel, "cpu")
    if rows.copies is None:
        return rows
    index = rows.copies.index
    rows.copies = KeyCopies(index)
    reads = read_trunks(layout, copies_per_row=0.0) if without_trunks else None
    if reads is not None:
        rest_index = GatherIndex.from_layout(reads.rest, "cpu") if reads.rest.num_gathered_kv else None
        bounds = (Bounds.of(reads, "cpu"), Bounds.of(reads.rest, "cpu"))
        rows.copies = KeyCopies(index, WithoutTrunks(reads.rows, reads.keys, *bounds, rest_index))
    return rows


def outcome(rows: PackedRows, tensors: Tensors, window_size: int = -1) -> Outcome:
    q, k, v = (t.detach().clone().requires_grad_() for t in (tensors.q, tensors.k, tensors.v))
    out = rows.attend_packed(q, k, v, AttentionOptions(q.shape[-1] ** -0.5, window_size))
    out.backward(tensors.grad_out)
    return Outcome(out.detach(), q.grad, k.grad, v.grad)


@given(batches(), st.sampled_from([(1, 1), (4, 2)]), st.sampled_from([-1, 0, 3]), st.booleans(), st.integers(0, 999))
@settings(max_examples=80)
def test_random_tries_have_the_gradients_of_their_sequences_alone_without_copies_of_roots(
    batch: Batch, heads: tuple[int, int], window_size: int, without_trunks: bool, seed: int
) -> None:
    layout = batch.layout()
    tensors = random_tensors(layout.num_tokens, *heads, head_dim=4, seed=seed, dtype=torch.float64)
    expected = dense_outcome(tensors, layout, batch.sequences, window_size)
    assert_equal(outcome(packed_rows(layout, without_trunks=without_trunks), tensors, window_size), expected)


@pytest.mark.parametrize("without_trunks", [True, False], ids=["trunks apart", "all copied"])
@pytest.mark.parametrize("batch", [GROUP, TREE], ids=["groups", "tree"])
def test_gradients_that_compiled_layers_take_lie_heads_first_and_are_the_same(
    batch: Batch, without_trunks: bool
) -> None:
    layout = batch.layout()
    tensors = random_tensors(layout.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=0, dtype=torch.float64)
    expected = outcome(packed_rows(layout, without_trunks=without_trunks), tensors)
    seen: list[torch.Tensor] = []

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        for x in args[:3]:
            x.register_hook(seen.append)
        return replace(reference_passes.attend, heads_first=True)(*args, **kwargs)

    rows = packed_rows(layout, without_trunks=without_trunks)
    rows.kernel = KERNEL.for_compiled_layers()
    assert rows.kernel.attend == replace(reference_passes.attend, heads_first=True)
    rows.kernel = replace(rows.kernel, around=lambda _, *args, **kwargs: attend(*args, **kwargs))
    assert_equal(outcome(rows, tensors), expected, tolerance=0.0)
    assert len(seen) == 3
    assert all(gradient.transpose(0, 1).is_contiguous() for gradient in seen)


class Copies(TorchDispatchMode):
    """Rows that ``index_select`` takes, outside of operators that run as one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_select.default:
            self.rows += len(args[2])
        self.operators += func.name() == OPERATOR
        return func(*args, **(kwargs or {}))


def test_a_backward_copies_no_key_of_a_root() -> None:
    for batch, num_copies in ((GROUP, 0), (TREE, 2 * len(read_trunks(TREE.layout(), 0.0).rest.kv_index))):
        layout = batch.layout()
        tensors = random_tensors(layout.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=0, dtype=torch.float64)
        rows, copies = packed_rows(layout), Copies()
        q, k, v = (t.requires_grad_() for t in (tensors.q, tensors.k, tensors.v))
        out = rows.attend_packed(q, k, v, AttentionOptions(0.3))
        with copies:
            out.backward(tensors.grad_out)
        assert copies.rows == num_copies


def test_a_layer_that_is_computed_again_copies_no_key_and_runs_no_kernel() -> None:
    layout = GROUP.layout()
    tensors = random_tensors(layout.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=0, dtype=torch.float64)
    rows, copies = packed_rows(layout), Copies()
    q, k, v = (t.requires_grad_() for t in (tensors.q, tensors.k, tensors.v))
    expected = outcome(rows, tensors)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rows.attend_packed(q, k, v, AttentionOptions(8**-0.5)) * 1.0

    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, (OPERATOR,)))
    out = checkpoint(layer, q, k, v, use_reentrant=False, context_fn=contexts)
    with copies:
        out.backward(tensors.grad_out)
    assert (copies.rows, copies.operators) == (0, 0)
    assert_equal(Outcome(out.detach(), q.grad, k.grad, v.grad), expected, tolerance=0.0)


def test_values_narrower_than_keys_are_widened_before_they_are_copied() -> None:
    """As in multi-head latent attention."""
    layout = TREE.layout()
    tensors = random_tensors(layout.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=0, dtype=torch.float64)
    narrow = replace(tensors, v=tensors.v[..., :6], grad_out=tensors.grad_out[..., :6])
    widened = replace(tensors, v=tensors.v.clone(), grad_out=tensors.grad_out.clone())
    widened.v[..., 6:], widened.grad_out[..., 6:] = 0.0, 0.0
    got, want = outcome(packed_rows(layout), narrow), outcome(packed_rows(layout), widened)
    cut = Outcome(want.out[..., :6], want.dq, want.dk, want.dv[..., :6])
    assert_equal(got, cut)
