"""The op equals attention of every sequence alone, in float64 to 1e-10, however it cuts its problems."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.attention.dense import assert_equal, dense_outcome, packed_outcome, random_tensors
from tests.layout.tries import Batch, batch_of, batches, segment_paths, sequence_rows
from verl_pg_plugin.attention import tree
from verl_pg_plugin.attention.cache import CacheAccess, CachedTokens, PrefixCache
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.gather import Gather
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.op import AttentionOptions, Tape, checkpoint_contexts
from verl_pg_plugin.attention.passes import Varlen
from verl_pg_plugin.layout import Chunk, PackedLayout, build_chunk_layout

PROMPT = tuple(range(100, 112))
GROUP = batch_of((PROMPT, range(1, 8)), (PROMPT, (9, 8)), (PROMPT, range(20, 25)), ((3, 4), (5, 6)))
SDPA = select_kernel("sdpa", "cpu")
CUTS = st.sampled_from([(4, 3), (0.5, 0.0), (0.5, 1e9), (100, 0.0), (4, 1.0)])
"""Gathered keys per token that are held at once, and that a problem of its own must save."""


def cut(monkeypatch: pytest.MonkeyPatch, cuts: tuple[float, float]) -> None:
    monkeypatch.setattr(tree, "GATHERED_PER_TOKEN", cuts[0])
    monkeypatch.setattr(tree, "SAVED_PER_TOKEN", cuts[1])
    monkeypatch.setattr(tree, "SHORTEST_IN_PLACE", 1)


@given(
    batches(),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.sampled_from([-1, 0, 1, 3]),
    st.sampled_from([0.0, 0.0, 1.5]),
    st.booleans(),
    st.sampled_from([4, 4, 3]),
    CUTS,
    st.integers(0, 999),
)
@settings(max_examples=150)
def test_random_trees_attend_like_their_sequences_alone(
    batch: Batch, heads: tuple[int, int], window: int, softcap: float, sinks: bool, value_dim: int, cuts: Any, seed: int
) -> None:
    layout = batch.layout()
    shape = {"head_dim": 4, "value_dim": value_dim, "sinks": sinks}
    tensors = random_tensors(layout.num_tokens, *heads, seed=seed, dtype=torch.float64, **shape)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut(monkeypatch, cuts)
        actual = packed_outcome(tensors, layout, window, softcap=softcap)
    assert_equal(actual, dense_outcome(tensors, layout, batch.sequences, window, softcap))


@pytest.mark.parametrize("window", [-1, 5, 12, 100], ids=["full", "in response", "across fork", "wider"])
def test_a_grpo_group_attends_like_its_sequences_alone(window: int) -> None:
    layout = GROUP.layout()
    tensors = random_tensors(layout.num_tokens, heads=8, kv_heads=2, head_dim=16, seed=0, dtype=torch.float64)
    assert_equal(packed_outcome(tensors, layout, window), dense_outcome(tensors, layout, GROUP.sequences, window))


CHUNKED = {
    "a group": batch_of(*[(PROMPT, (1 + i, 30, 31 + i)) for i in range(6)]),
    "a tree": batch_of(
        *[((*PROMPT, *range(a)), (40 + a, 50 + b, *range(60, 60 + b))) for a in (7, 5, 2) for b in range(4)],
        *[((*PROMPT[:4], 9, 9), (b, b)) for b in range(3)],
    ),
}


@pytest.mark.parametrize("cuts", [(4, 3), (0.5, 0.0), (100, 1e9)], ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(-1, False), (-1, True), (5, True)])
@pytest.mark.parametrize("sizes", [(3, 99), (2, 2, 99), (1, 1, 1, 1, 99), (5, 4, 99)], ids=str)
@pytest.mark.parametrize("batch", CHUNKED.values(), ids=CHUNKED)
def test_chunks_of_a_split_group_give_what_the_whole_group_gives(
    batch: Batch, sizes: tuple[int, ...], window: int, sinks: bool, cuts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training order: a prefill publishes, the last chunk runs first, pending gradients reach their owner."""
    cut(monkeypatch, cuts)
    whole, order = batch.layout(), batch.order()
    tensors = random_tensors(whole.num_tokens, 4, 2, 4, seed=0, dtype=torch.float64, sinks=sinks)
    expected = dense_outcome(tensors, whole, batch.sequences, window)  # its scale is that of four numbers
    found = [torch.full_like(x, torch.nan) for x in (expected.out, expected.dq, expected.dk, expected.dv)]
    dsinks = torch.zeros_like(tensors.sinks) if sinks else None
    bounds = np.unique(np.minimum(np.cumsum([0, *sizes]), len(batch.sequences))).tolist()
    read = [0, *(int(order.num_shared[start]) for start in bounds[1:-1]), 0]
    cache, options = PrefixCache(), AttentionOptions(0.5, window, 0.0, 3, tensors.sinks)

    def run(layout: PackedLayout, sequences: list[tuple[int, ...]], access: CacheAccess) -> list[torch.Tensor]:
        rows = rows_of(layout, sequences, whole)
        leaves = [x[rows].requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
        sinks_H = [] if tensors.sinks is None else [tensors.sinks.clone().requires_grad_()]
        context = PackedAttention(layout, SDPA, "cpu", access)
        out = context.attend_packed(*leaves, replace(options, sinks=sinks_H[0] if sinks_H else None))
        if access.prefill:
            return []
        gradients = torch.autograd.grad(out, [*leaves, *sinks_H], tensors.grad_out[rows])
        for total, part in zip(found, (out.detach(), *gradients), strict=False):
            total[rows] = part
        return list(gradients[3:])

    for i in reversed(range(len(bounds) - 1)):
        sequences = [batch.sequences[s] for s in order.sequences[bounds[i] : bounds[i + 1]]]
        keep = min(read[i], *order.num_shared[bounds[i] + 1 : bounds[i + 1] + 1].tolist(), read[i + 1])
        layout = chunk_layout(sequences, batch, num_read=read[i], keep=keep, read_next=read[i + 1])
        consumed = cache.pop(layout.publish_start) if len(layout.publish) else []
        for block in consumed:
            block.values.clear()
        if (prefill := layout.prefill) is not None:
            publish = CachedTokens(prefill.publish_start, prefill.publish_start + len(prefill.publish))
            with torch.no_grad():
                run(prefill, sequences[:1], CacheAccess(prefill, list(cache.blocks), publish, prefill=True))
            cache.push(publish)
        for gradient in run(layout, sequences, CacheAccess(layout, list(cache.blocks), consumed=consumed)):
            dsinks += gradient
    assert cache.num_tokens == 0
    assert_equal(type(expected)(*found, dsinks), expected)


def chunk_layout(
    sequences: list[tuple[int, ...]], batch: Batch, num_read: int, keep: int, read_next: int
) -> PackedLayout:
    """Sorted sequences that read ``num_read`` cached tokens; the next chunk reads ``read_next`` and keeps ``keep``."""
    prompts = [batch.prompt_lengths[batch.sequences.index(sequence)] for sequence in sequences]
    offsets = np.cumsum([0, *map(len, sequences)])
    part = Chunk(num_sequences=len(sequences), num_cached=num_read, num_kept=keep, num_read_next=read_next)
    tokens, first_label = np.concatenate([np.array(sequence) for sequence in sequences]), min(batch.prompt_lengths) - 1
    return build_chunk_layout(
        tokens, offsets, np.array(prompts), chunk=part, first_label=first_label, forward_only=False
    )


def rows_of(layout: PackedLayout, sequences: list[tuple[int, ...]], whole: PackedLayout) -> torch.Tensor:
    """The tokens of a chunk among those of the whole group."""
    offsets = np.cumsum([0, *map(len, sequences)])
    of = np.searchsorted(offsets, layout.token_index, side="right") - 1
    places = zip(of.tolist(), (layout.token_index - offsets[of]).tolist(), strict=True)
    return torch.tensor([sequence_rows(whole, sequences[s])[position] for s, position in places])


def test_changing_one_response_leaves_its_siblings_bit_equal() -> None:
    layout = GROUP.layout()
    tensors = random_tensors(layout.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=1, dtype=torch.float32)
    before = packed_outcome(tensors, layout)
    changed = sequence_rows(layout, GROUP.sequences[0])[len(PROMPT) - 1 :]
    for tensor in (tensors.q, tensors.k, tensors.v):
        tensor[changed] += 1.0
    after = packed_outcome(tensors, layout)
    others = [row for row in range(layout.num_tokens) if row not in changed]
    assert torch.equal(after.out[others], before.out[others])
    assert torch.equal(after.dq[others], before.dq[others])
    assert not torch.isclose(after.out[changed], before.out[changed]).all(dim=-1).any()


def test_the_gradient_of_one_response_reaches_no_sibling() -> None:
    layout = GROUP.layout()
    tensors = random_tensors(layout.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=2, dtype=torch.float64)
    own = sequence_rows(layout, GROUP.sequences[1])[len(PROMPT) - 1 :]
    tensors.grad_out[[row for row in range(layout.num_tokens) if row not in own]] = 0.0
    outcome = packed_outcome(tensors, layout)
    visible = next(path for path in segment_paths(layout) if path[-1] == own[-1])
    hidden = [row for row in range(layout.num_tokens) if row not in visible]
    for gradient in (outcome.dq, outcome.dk, outcome.dv):
        assert not gradient[hidden].any()
    assert outcome.dk[visible].flatten(1).any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    layout = GROUP.layout()
    outcome = packed_outcome(random_tensors(layout.num_tokens, 4, 2, 8, seed=3, dtype=dtype), layout)
    assert {outcome.out.dtype, outcome.dq.dtype, outcome.dk.dtype, outcome.dv.dtype} == {dtype}


def test_padding_follows_the_other_tokens_and_attends_to_nothing() -> None:
    layout = GROUP.layout()
    packed = PackedAttention(layout, SDPA, "cpu")
    tensors = random_tensors(layout.num_tokens + 3, heads=4, kv_heads=2, head_dim=8, seed=6, dtype=torch.float64)
    options = AttentionOptions(8**-0.5)
    padded = packed.attend_packed(tensors.q, tensors.k, tensors.v, options)
    alone = packed.attend_packed(*(x[: layout.num_tokens] for x in (tensors.q, tensors.k, tensors.v)), options)
    assert torch.equal(padded[: layout.num_tokens], alone)
    assert padded.shape == tensors.q.shape
    assert not padded[layout.num_tokens :].any()


class Recorded:
    """``sdpa`` that records its problems and where its gradients lie."""

    def __init__(self, heads_first: bool = False) -> None:
        self.forwards: list[tuple[int, Varlen]] = []
        self.backwards: list[tuple[int, Varlen]] = []
        self.kernel = replace(SDPA, forward=self._forward, backward=self._backward, heads_first=heads_first)

    def _forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Varlen) -> Any:
        self.forwards.append((len(k), problem))
        return SDPA.forward(q, k, v, problem)

    def _backward(self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *others: Any) -> None:
        self.backwards.append((len(k), others[-1]))
        SDPA.backward(dout, q, k, *others)


def test_a_kernel_is_told_how_long_the_longest_segment_is() -> None:
    """sdpa does not look at it; flash-attn leaves out what lies behind."""
    layout, recorded = GROUP.layout(), Recorded()
    packed_outcome(
        random_tensors(layout.num_tokens, 2, 2, 8, seed=7, dtype=torch.float64), layout, kernel=recorded.kernel
    )
    ((_, problem),) = recorded.forwards
    assert (problem.max_seqlen_q, problem.max_seqlen_k) == (11, 11 + 7), "the prompt but its last; the longest response"


def many_responses() -> Batch:
    return batch_of(*[((*PROMPT, *range(60)), (1000 + i, 7, i)) for i in range(40)])


def test_no_more_keys_are_gathered_at_once_than_the_stated_share_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "GATHERED_PER_TOKEN", 4)
    layout, recorded = many_responses().layout(), Recorded()
    assert len(layout.kv_index) > 10 * layout.num_tokens
    packed_outcome(
        random_tensors(layout.num_tokens, 2, 1, 8, seed=7, dtype=torch.float64), layout, kernel=recorded.kernel
    )
    assert max(keys for keys, _ in recorded.forwards) <= tree.GATHERED_PER_TOKEN * layout.num_tokens
    assert sum(keys for keys, _ in recorded.forwards) == len(layout.kv_index)


def test_a_backward_gathers_no_key_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, recorded, gathers = many_responses().layout(), Recorded(), []
    tensors = random_tensors(layout.num_tokens, 2, 1, 8, seed=7, dtype=torch.float64)
    monkeypatch.setattr(Gather, "sum", lambda *args, **options: gathers.append(args))
    packed_outcome(tensors, layout, kernel=recorded.kernel)
    assert gathers == []
    (keys, rest), (prompt_keys, prompt) = recorded.backwards
    assert (keys, rest.causal) == (layout.num_tokens, True)
    assert (prompt_keys, prompt.causal) == (len(PROMPT) + 59, False)


@pytest.mark.parametrize("cuts", [(4, 3), (4, 1e9), (0.5, 0.0)], ids=str)
def test_gradients_that_compiled_layers_take_lie_heads_first_and_are_the_same(
    cuts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, where sums in float32 are rounded into memory of their own."""
    cut(monkeypatch, cuts)
    layout = many_responses().layout()
    tensors = random_tensors(layout.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=0, dtype=torch.bfloat16)
    expected = packed_outcome(tensors, layout)
    actual = packed_outcome(tensors, layout, kernel=Recorded(heads_first=True).kernel)
    assert_equal(actual, expected, tolerance=0.0)
    assert all(x.transpose(0, 1).is_contiguous() for x in (actual.dq, actual.dk, actual.dv))


def test_gradients_of_many_pieces_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of rounded sums lose a bit for every doubling of the group."""
    layout, exact = many_responses().layout(), Recorded()
    tensors = random_tensors(layout.num_tokens, 2, 1, 8, seed=7, dtype=torch.bfloat16)
    expected = packed_outcome(tensors.to(torch.float64), layout)
    errors = []
    for cuts in ((4, 3), (0.5, 1e9)):
        cut(monkeypatch, cuts)
        errors.append((packed_outcome(tensors, layout, kernel=exact.kernel).dk - expected.dk).norm())
    assert errors[1] < 1.3 * errors[0]


def test_a_checkpointed_layer_keeps_attention_and_gradients_are_the_same_to_the_bit() -> None:
    """Two calls in a layer, as in LongCat Flash, and two backwards of one graph."""
    layout, recorded = GROUP.layout(), Recorded()
    tensors = random_tensors(layout.num_tokens, 2, 2, 8, seed=0, dtype=torch.float32, sinks=True)
    context, options = PackedAttention(layout, recorded.kernel, "cpu"), AttentionOptions(0.3)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        once = context.attend_packed(q.sin(), k.sin(), v, replace(options, sinks=sinks))
        return context.attend_packed(once.cos(), k, v, options).sin()

    leaves = tensors.leaves()
    expected = torch.autograd.grad(layer(*leaves).sum(), leaves)
    assert len(recorded.forwards) == 2
    out = checkpoint(layer, *leaves, use_reentrant=False, context_fn=lambda: checkpoint_contexts(Tape()))
    for _ in range(2):
        found = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        assert len(recorded.forwards) == 4
        assert all(map(torch.equal, found, expected))


def test_what_a_layer_that_failed_has_begun_is_nobody_elses() -> None:
    layout = GROUP.layout()
    tensors = random_tensors(layout.num_tokens, heads=2, kv_heads=2, head_dim=8, seed=0, dtype=torch.float32)
    context = PackedAttention(layout, SDPA, "cpu")
    forward, _ = checkpoint_contexts(Tape())

    def layer() -> None:
        with forward:
            context.attend_packed(tensors.q, tensors.k, tensors.v, AttentionOptions(1.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        layer()
    recorded = Recorded()
    packed_outcome(tensors, layout, kernel=recorded.kernel)
    assert len(recorded.forwards) == 1


def test_a_graph_that_is_dropped_leaves_no_kept_output() -> None:
    layout = GROUP.layout()
    tensors = random_tensors(layout.num_tokens, heads=2, kv_heads=2, head_dim=8, seed=0, dtype=torch.float32)
    context, held = PackedAttention(layout, SDPA, "cpu"), []

    def layer(*leaves: torch.Tensor) -> torch.Tensor:
        out = context.attend_packed(*leaves, AttentionOptions(1.0))
        held.append(weakref.ref(out.untyped_storage()))
        return out.sin()

    out = checkpoint(layer, *tensors.leaves(), use_reentrant=False, context_fn=lambda: checkpoint_contexts(Tape()))
    del out
    gc.collect()
    assert held[0]() is None


def test_an_index_is_made_once_for_its_arguments_and_anew_for_others() -> None:
    layout = batch_of(((1, 2), (3,)), ((1, 2), (4,))).layout()
    context, made = PackedAttention(layout, SDPA, "cpu"), []

    def windows(layout: PackedLayout, width: int) -> int:
        made.append(width)
        return layout.num_tokens * width

    assert [context.index(windows, width) for width in (3, 3, 4)] == [9, 9, 12]
    assert made == [3, 4]
    context.layout = None
    with pytest.raises(RuntimeError, match="have no layout"):
        context.index(windows, 3)
