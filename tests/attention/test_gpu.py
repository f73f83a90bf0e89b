"""Kernels on a GPU: packed attention in bf16 is as close to float32 as the kernel on every sequence alone is."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.attention.dense import Outcome, Tensors, assert_equal, cut, dense_outcome, packed_outcome, random_tensors
from tests.layout.tries import Batch, batch_of, sequence_rows
from verl_pg_plugin.attention import plan
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.kernels import Kernel, kernel_obstacle, load_passes, select_kernel
from verl_pg_plugin.attention.op import AttentionOptions
from verl_pg_plugin.attention.passes import softcap_fault
from verl_pg_plugin.layout import PackedLayout

pytestmark = pytest.mark.gpu


def gpu_kernels(*names: str) -> pytest.MarkDecorator:
    """Parameter ``name``; a kernel that cannot run here is skipped with the reason."""
    return pytest.mark.parametrize("name", [gpu_case(name) for name in names])


def gpu_case(name: str, *values: Any, slow: bool = False) -> Any:
    obstacle = kernel_obstacle(name, "cuda")
    marks = [pytest.mark.skipif(bool(obstacle), reason=f"{name} {obstacle}")]
    return pytest.param(name, *values, marks=[*marks, pytest.mark.slow] if slow else marks)


NAMES = ("flash_attn_4", "flash_attn_3", "flash_attn_2", "torch_varlen")
SHAPES = ((128, (16, 4)), (128, (8, 8)), (64, (16, 4)), (64, (8, 8)))
every_kernel = gpu_kernels(*NAMES)

PROMPT = tuple(range(1000, 1700))
TURN = (*PROMPT, *range(2000, 2150))
BATCH = batch_of(
    *[(PROMPT, range(3000 + 500 * i, 3000 + 500 * i + length)) for i, length in enumerate((300, 17, 120, 1))],
    (TURN, range(6000, 6090)),
    (TURN, range(6100, 6200)),
    (range(7000, 7333), range(8000, 8050)),
)


TEMPLATE = (5, 6, 7, 8)
SHORT = batch_of(
    *[((*TEMPLATE, *PROMPT), range(3000 + 100 * i, 3040 + 101 * i)) for i in range(24)],
    *[((*TEMPLATE, *TURN[200:]), range(6000 + 100 * i, 6011 + 107 * i)) for i in range(20)],
    ((*TEMPLATE, *TURN[200:]), (6000, *range(9000, 9040))),
)
"""Two prompts of one template, one of them with nested branches; gathering would copy them ten times."""


def replicated_outcome(
    tensors: Tensors, layout: PackedLayout, batch: Batch, window: int, kernel: Kernel, softcap: float = 0.0
) -> Outcome:
    """Run every sequence with all its rows through the kernel, as remove-padding does.

    The loss reads a shared row in the first sequence that has it; gradients of copies are summed in float32.
    """
    lengths, device = [len(tokens) - 1 for tokens in batch.sequences], tensors.q.device
    rows = torch.tensor([row for tokens in batch.sequences for row in sequence_rows(layout, tokens)], device=device)
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    seen: set[int] = set()
    first = torch.tensor([row not in seen and not seen.add(row) for row in rows.tolist()], device=device)

    alone = PackedAttention.unshared(kernel, cu_seqlens, max(lengths), len(rows))
    copies = [t.detach()[rows].requires_grad_() for t in (tensors.q, tensors.k, tensors.v)]
    out = alone.attend_packed(*copies, AttentionOptions(tensors.q.shape[-1] ** -0.5, window, softcap))
    grads = torch.autograd.grad(out, copies, tensors.grad_out[rows] * first[:, None, None])
    zeros = (torch.zeros(layout.num_tokens, *grad.shape[1:], device=device) for grad in grads)
    sums = (total.index_add_(0, rows, grad.float()).to(grad.dtype) for total, grad in zip(zeros, grads, strict=True))
    return Outcome(torch.zeros_like(tensors.q).index_copy(0, rows[first], out.detach()[first]), *sums)


def assert_as_close(packed: Outcome, replicated: Outcome, exact: Outcome) -> None:
    """Check that the error norm is at most 1.1x, and the largest single error at most 2x."""
    for name in ("out", "dq", "dk", "dv"):
        want = getattr(exact, name)
        ours, theirs = (getattr(packed, name).float() - want).abs(), (getattr(replicated, name).float() - want).abs()
        assert ours.norm() <= 1.1 * theirs.norm(), f"{name}: {ours.norm():.3g} against {theirs.norm():.3g}"
        assert ours.max() <= 2 * theirs.max(), f"{name}: {ours.max():.3g} against {theirs.max():.3g} at worst"


def check(name, batch, heads=(16, 4), head_dim=128, window=-1, softcap=0.0, heads_first=False) -> Outcome:
    layout, kernel = batch.layout(), select_kernel(name, "cuda")
    tensors = random_tensors(layout.num_tokens, *heads, head_dim, seed=0, dtype=torch.bfloat16, device="cuda")
    exact = dense_outcome(tensors.to(torch.float32), batch, window, softcap)
    packed = packed_outcome(tensors, layout, window, replace(kernel, heads_first=heads_first), softcap)
    assert_as_close(packed, replicated_outcome(tensors, layout, batch, window, kernel, softcap), exact)
    return packed


@pytest.mark.parametrize("window", [-1, 64, 800], ids=["full", "window in response", "window across fork"])
@pytest.mark.parametrize(
    ("name", "head_dim", "heads"),
    # flash-attn 4 compiles each new shape for a minute or more.
    [gpu_case(name, *shape, slow=name == "flash_attn_4" and shape != SHAPES[0]) for name in NAMES for shape in SHAPES],
)
def test_packed_bf16_is_as_exact_as_single_sequences(name, head_dim, heads, window) -> None:
    check(name, BATCH, heads, head_dim, window)


CUTS = {"default": (4, 3), "in place": (0.5, 0.0), "gathered": (0.5, 1e9)}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens first", "heads first"])
@every_kernel
def test_gradients_are_as_exact_for_any_split_into_calls(name, heads_first, cuts, monkeypatch) -> None:
    cut(monkeypatch, cuts, shortest=plan.SHORTEST_IN_PLACE)
    packed = check(name, SHORT, heads_first=heads_first)
    assert all(x.transpose(0, 1).is_contiguous() == heads_first for x in (packed.dq, packed.dk, packed.dv))


@gpu_kernels("flash_attn_4", "flash_attn_3", "flash_attn_2")
@pytest.mark.parametrize("batch", [SHORT, BATCH], ids=["prefixes in place", "all gathered"])
def test_packed_softcap_is_as_exact_as_single_sequences(name: str, batch: Batch) -> None:
    if fault := softcap_fault(load_passes(name), 128, "cuda"):
        pytest.skip(f"{name} {fault}")
    check(name, batch, softcap=1.5)


@every_kernel
@pytest.mark.parametrize(
    ("batch", "heads", "options", "window"),
    [
        pytest.param(SHORT, (16, 4), {"sinks": True}, -1, id="learned sinks"),
        pytest.param(SHORT, (16, 4), {"sinks": True}, 800, id="learned sinks and a window"),
        pytest.param(BATCH, (8, 8), {"value_dim": 96}, -1, id="narrow values"),
    ],
)
def test_sinks_and_narrow_values_are_exact(name, batch, heads, options, window) -> None:
    layout, kernel = batch.layout(), select_kernel(name, "cuda")
    tensors = random_tensors(layout.num_tokens, *heads, 128, 0, torch.bfloat16, "cuda", **options)
    exact = dense_outcome(tensors.to(torch.float32), batch, window)
    packed = packed_outcome(tensors, layout, window, kernel)
    for part in ("out", "dq", "dk", "dv", "dsinks")[: 5 if tensors.sinks is not None else 4]:
        got, want = getattr(packed, part).float(), getattr(exact, part)
        assert (got - want).norm() < 0.01 * want.norm(), part


@every_kernel
def test_deterministic_gradients_are_bit_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    layout, kernel = SHORT.layout(), select_kernel(name, "cuda")
    tensors = random_tensors(layout.num_tokens, 16, 4, 128, seed=0, dtype=torch.bfloat16, device="cuda")
    if name == "torch_varlen":
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        torch.use_deterministic_algorithms(True)
    try:
        first, second = (packed_outcome(tensors, layout, kernel=kernel) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal(first, second, tolerance=0.0)


def test_sdpa_on_a_gpu_is_exact() -> None:
    layout = BATCH.layout()
    tensors = random_tensors(layout.num_tokens, 4, 2, 16, seed=0, dtype=torch.float32, device="cuda")
    assert_equal(packed_outcome(tensors, layout, 64), dense_outcome(tensors, BATCH, 64), tolerance=1e-5)


@every_kernel
def test_changed_responses_leave_siblings_bit_equal(name: str) -> None:
    layout, kernel = BATCH.layout(), select_kernel(name, "cuda")
    tensors = random_tensors(layout.num_tokens, 16, 4, 128, seed=1, dtype=torch.bfloat16, device="cuda")
    before = packed_outcome(tensors, layout, kernel=kernel).out
    changed = sequence_rows(layout, BATCH.sequences[0])[len(PROMPT) - 1 :]
    for tensor in (tensors.q, tensors.k, tensors.v):
        tensor[changed] += 1.0
    after = packed_outcome(tensors, layout, kernel=kernel).out
    others = [row for row in range(layout.num_tokens) if row not in set(changed)]
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[changed], before[changed])


@every_kernel
def test_float32_queries_under_autocast_run_in_bf16_and_keep_their_gradients(name: str) -> None:
    """Norms in float32 pass float32 to a kernel that does not take it."""
    layout, kernel = BATCH.layout(), select_kernel(name, "cuda")
    tensors = random_tensors(layout.num_tokens, 16, 4, 128, seed=2, dtype=torch.bfloat16, device="cuda")
    expected = packed_outcome(tensors, layout, kernel=kernel)
    wide = Tensors(tensors.q.float(), tensors.k.float(), tensors.v.float(), tensors.grad_out)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual = packed_outcome(wide, layout, kernel=kernel)
    assert torch.equal(actual.out, expected.out)
    torch.testing.assert_close(actual.dv.to(torch.bfloat16), expected.dv, rtol=0.02, atol=0.02)
