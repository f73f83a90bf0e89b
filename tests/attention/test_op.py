"""The op equals attention of every sequence alone, in float64 to 1e-10, for any split into kernel calls."""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.attention.dense import assert_equal, cut, dense_outcome, packed_outcome, random_tensors
from tests.layout.tries import Key, batch_of, batches, cut_at_cost, lay_out, part_keys
from verl_pg_plugin.attention.cache import CacheAccess, PrefixCache
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.gather import Gather
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.op import AttentionOptions
from verl_pg_plugin.attention.passes import Varlen
from verl_pg_plugin.attention.plan import VarlenCall
from verl_pg_plugin.engine.activations import CheckpointRecord, LayerCheckpoints, checkpoint_layer
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.planning.activation_level import Level
from verl_pg_plugin.planning.activation_policy import CacheWeights
from verl_pg_plugin.planning.micro_batches import MicroBatchLimits

PROMPT = tuple(range(100, 112))
GROUP = batch_of((PROMPT, range(1, 8)), (PROMPT, (9, 8)), (PROMPT, range(20, 25)), ((3, 4), (5, 6)))
SDPA = select_kernel("sdpa", "cpu")
CUTS = st.sampled_from([(4, 3), (0.5, 0.0), (0.5, 1e9), (100, 0.0), (4, 1.0)])


@given(
    batches(),
    st.sampled_from([(1, 1), (4, 2), (8, 2), (6, 1)]),
    st.sampled_from([-1, 0, 1, 3, 100]),
    st.sampled_from([0.0, 0.0, 1.5]),
    st.booleans(),
    st.sampled_from([4, 4, 3]),
    CUTS,
    st.integers(0, 999),
)
@settings(max_examples=150)
def test_random_trees_match_single_sequences(batch, heads, window, softcap, sinks, value_dim, cuts, seed) -> None:
    layout, shape = batch.layout(), {"head_dim": 4, "value_dim": value_dim, "sinks": sinks}
    tensors = random_tensors(layout.num_tokens, *heads, seed=seed, dtype=torch.float64, **shape)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut(monkeypatch, cuts)
        actual = packed_outcome(tensors, layout, window, softcap=softcap)
    assert_equal(actual, dense_outcome(tensors, batch, window, softcap))


CHUNKED = {
    "a group": batch_of(*[(PROMPT, (1 + i, 30, 31 + i)) for i in range(6)]),
    "a tree": batch_of(
        *[((*PROMPT, *range(a)), (40 + a, 50 + b, *range(60, 60 + b))) for a in (7, 5, 2) for b in range(4)],
        *[((*PROMPT[:4], 9, 9), (b, b)) for b in range(3)],
    ),
}


@pytest.mark.parametrize("cuts", [(4, 3), (0.5, 0.0), (100, 1e9)], ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(-1, False), (-1, True), (5, True)])
@pytest.mark.parametrize("most", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", CHUNKED.values(), ids=CHUNKED)
def test_chunks_of_a_split_group_match_the_whole_group(batch, most, window, sinks, cuts, monkeypatch) -> None:
    """In training order: pending gradients reach the chunk that owns the token."""
    cut(monkeypatch, cuts)
    whole, row_of = batch.layout(), {key: row for row, (_, key) in enumerate(part_keys(batch, 0))}
    tensors = random_tensors(whole.num_tokens, 4, 2, 4, seed=0, dtype=torch.float64, sinks=sinks)
    expected = dense_outcome(tensors, batch, window)  # the scale for a head_dim of 4
    results = [torch.full_like(x, torch.nan) for x in (expected.out, expected.dq, expected.dk, expected.dv)]
    dsinks = torch.zeros_like(tensors.sinks) if sinks else None
    cache, options = PrefixCache(), AttentionOptions(0.5, window, 0.0, 3, tensors.sinks)

    def run(layout: PackedLayout, keys: list[tuple[int, Key]], access: CacheAccess | None) -> list[torch.Tensor]:
        rows = torch.tensor([row_of[key] for _, key in keys])
        leaves = [x[rows].requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
        sinks_H = [] if tensors.sinks is None else [tensors.sinks.clone().requires_grad_()]
        context = PackedAttention(layout, SDPA, access)
        out = context.attend_packed(*leaves, replace(options, sinks=sinks_H[0] if sinks_H else None))
        if not out.requires_grad:
            return []
        gradients = torch.autograd.grad(out, [*leaves, *sinks_H], tensors.grad_out[rows])
        for total, part in zip(results, (out.detach(), *gradients), strict=False):
            total[rows] = part
        return list(gradients[3:])

    (group,) = cut_at_cost(batch.order(), MicroBatchLimits(None, most), CacheWeights(), cost=0.0)
    assert len(group) > 1
    for part in lay_out(batch, group, forward_only=False)[::-1]:
        layout = part.layout
        consumed = cache.consume(layout)
        if (prefill := layout.prefill) is not None:
            access = cache.access(prefill, publishes=True, prefill=True)
            with torch.no_grad():
                run(prefill, part.keys[prefill.num_cached : layout.num_cached], access)
        access = cache.access(layout, publishes=False, consumed=consumed)
        for gradient in run(layout, part.own_keys, access):
            dsinks += gradient
    assert not cache.num_tokens
    assert_equal(type(expected)(*results, dsinks), expected)


def recorded() -> Any:
    return replace(SDPA, forward=Mock(wraps=SDPA.forward), backward=Mock(wraps=SDPA.backward))


def problems(calls: Mock) -> list[tuple[int, Varlen]]:
    """Return the number of keys and the problem of each call."""
    keys_at = 1 if len(calls.call_args.args) == 4 else 2  # queries come first, and in a backward their gradient
    return [(len(call.args[keys_at]), call.args[-1]) for call in calls.call_args_list]


def test_max_seqlens_of_the_forward_are_exact() -> None:
    """flash-attn ignores tokens beyond them; sdpa does not read them."""
    layout, kernel = GROUP.layout(), recorded()
    packed_outcome(random_tensors(layout.num_tokens, 2, 2, 8, seed=7, dtype=torch.float64), layout, kernel=kernel)
    ((_, problem),) = problems(kernel.forward)
    assert (problem.max_seqlen_q, problem.max_seqlen_k) == (11, 11 + 7), "prompt but its last token; longest response"


MANY = batch_of(*[((*PROMPT, *range(60)), (1000 + i, 7, i)) for i in range(40)])
LAYOUT = MANY.layout()
TENSORS = random_tensors(LAYOUT.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=7, dtype=torch.float64, sinks=True)
BF16 = TENSORS.to(torch.bfloat16)


@pytest.mark.parametrize("window", [-1, 72])
def test_gathered_keys_stay_within_the_limit_per_token(window, monkeypatch) -> None:
    cut(monkeypatch, (4, 1e9))
    kernel = recorded()
    assert_equal(packed_outcome(TENSORS, LAYOUT, window, kernel=kernel), dense_outcome(TENSORS, MANY, window))
    for calls, most in ((problems(kernel.forward), 4), (problems(kernel.backward), 2)):
        assert len(calls) > 10 / most
        assert max(keys for keys, _ in calls) <= most * LAYOUT.num_tokens
        assert sum(keys for keys, _ in calls) == len(LAYOUT.kv_index) > 10 * LAYOUT.num_tokens


def test_gathered_keys_are_freed_before_the_next_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, (4, 1e9))
    gathered, gather = [], VarlenCall.read

    def gather_alone(call: VarlenCall, *tensors: torch.Tensor) -> Any:
        assert [ref for ref in gathered if ref() is not None] == []
        return gather(call, *tensors)

    def backward(*given: Any) -> None:
        gathered.extend(map(weakref.ref, given[1:-1]))
        SDPA.backward(*given)

    monkeypatch.setattr(VarlenCall, "read", gather_alone)
    packed_outcome(BF16, LAYOUT, kernel=replace(SDPA, backward=backward))
    assert len(gathered) > 2 * 8


def test_backward_reads_the_prompt_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, gathers = recorded(), []
    monkeypatch.setattr(Gather, "sum", lambda *args, **options: gathers.append(args))
    packed_outcome(TENSORS, LAYOUT, kernel=kernel)
    assert gathers == []
    (keys, rest), (prompt_keys, prompt) = problems(kernel.backward)
    assert (keys, rest.causal) == (LAYOUT.num_tokens, True)
    assert (prompt_keys, prompt.causal) == (len(PROMPT) + 59, False)
    assert (prompt.cu_seqlens_q.tolist(), prompt.cu_seqlens_k.tolist()) == ([0, 40 * 3], [0, prompt_keys])


@pytest.mark.parametrize("cuts", [(4, 3), (4, 1e9), (0.5, 0.0)], ids=str)
def test_heads_first_gradients_are_the_same(cuts, monkeypatch) -> None:
    """In bf16, where float32 sums are rounded into separate memory."""
    cut(monkeypatch, cuts)
    expected = packed_outcome(BF16, LAYOUT)
    actual = packed_outcome(BF16, LAYOUT, kernel=replace(SDPA, heads_first=True))
    assert_equal(actual, expected, tolerance=0.0)
    assert {x.dtype for x in (actual.out, actual.dq, actual.dk, actual.dv)} == {torch.bfloat16}
    assert all(x.transpose(0, 1).is_contiguous() for x in (actual.dq, actual.dk, actual.dv))


def test_gradients_of_many_calls_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of rounded sums lose a bit for every doubling of the group."""
    expected, errors = packed_outcome(BF16.to(torch.float64), LAYOUT), []
    for cuts in ((4, 3), (0.5, 1e9)):
        cut(monkeypatch, cuts)
        errors.append((packed_outcome(BF16, LAYOUT).dk - expected.dk).norm())
    assert errors[1] < 1.3 * errors[0]


@pytest.mark.parametrize("keeps", [True, False])
def test_checkpointed_layers_keep_gradients_to_the_bit(keeps: bool) -> None:
    """Two calls in a layer, as in LongCat Flash, and two backwards of one graph."""
    layout, kernel = GROUP.layout(), recorded()
    tensors = random_tensors(layout.num_tokens, 2, 2, 8, seed=0, dtype=torch.float32, sinks=True)
    context, options = PackedAttention(layout, kernel), AttentionOptions(0.3)

    def layer(q: Any, k: Any, v: Any, sinks: torch.Tensor, prefix_grouper: PackedAttention) -> torch.Tensor:
        once = prefix_grouper.attend_packed(q.sin(), k.sin(), v, replace(options, sinks=sinks))
        return prefix_grouper.attend_packed(once.cos(), k, v, options).sin()

    leaves = tensors.leaves()
    expected = torch.autograd.grad(layer(*leaves, context).sum(), leaves)
    assert kernel.forward.call_count == 2
    checkpoints = LayerCheckpoints(Level.ATTENTION if keeps else Level.INPUTS, None)
    context.checkpoint = checkpoints.run
    out = checkpoint_layer(partial(layer, prefix_grouper=context), *leaves)
    for forwards in (4, 4) if keeps else (6, 8):
        gradients = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        assert kernel.forward.call_count == forwards
        assert all(map(torch.equal, gradients, expected))


def test_extra_attention_calls_in_recomputation_are_an_error() -> None:
    """The first call would get the output of another; torch's own check sees the expected sizes."""
    tensors = random_tensors(GROUP.layout().num_tokens, 2, 2, 8, seed=0, dtype=torch.float32)
    record, calls = CheckpointRecord(None, lambda: None), iter(([1], [2, 1]))
    context = PackedAttention(GROUP.layout(), SDPA).with_record(record)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        record.start()
        for scale in next(calls):
            out = context.attend_packed(scale * q, k, v, AttentionOptions(0.3))
        return out.sin()

    out = checkpoint(layer, *tensors.leaves(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="more often when it is recomputed"):
        out.sum().backward()
