"""Kernels on a GPU: packed attention in bf16 is as close to float32 as the kernel on every sequence alone is."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from tests.attention.dense import Outcome, Tensors, dense_outcome, packed_outcome, random_tensors
from tests.attention.test_gather import BigGroup
from tests.attention.test_packed_attention import assert_equal
from tests.layout.tries import Batch, batch_of, sequence_rows
from verl_pg_plugin.attention.gather import GatherIndex, gather_rows, sum_over_readers
from verl_pg_plugin.attention.kernels.capped_scores import cap_fault
from verl_pg_plugin.attention.kernels.selection import VarlenKernel, kernel_obstacle, load_kernel, select_kernel
from verl_pg_plugin.attention.packed_rows import PackedRows
from verl_pg_plugin.attention.shared_rows import AttentionOptions
from verl_pg_plugin.layout import PackedLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


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
"""Two trunks below what all begin with, one of them with branches that branch; they would be copied ten times."""


def replicated_outcome(
    tensors: Tensors, layout: PackedLayout, batch: Batch, window: int, kernel: VarlenKernel, softcap: float = 0.0
) -> Outcome:
    """Every sequence with all of its rows through the same kernel, as remove-padding runs them.

    The loss reads each shared row's output in the first sequence that has it, as in the packed run; the gradients
    of copies are added in float32 and rounded once.
    """
    lengths = [len(tokens) - 1 for tokens in batch.sequences]
    device = tensors.q.device
    rows = torch.tensor([row for tokens in batch.sequences for row in sequence_rows(layout, tokens)], device=device)
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    first = torch.zeros(len(rows), dtype=torch.bool, device=device)
    first[first_places(rows.tolist())] = True

    q, k, v = (t.detach()[rows].requires_grad_() for t in (tensors.q, tensors.k, tensors.v))
    scale, longest = q.shape[-1] ** -0.5, max(lengths)
    options = {"softmax_scale": scale, "window_size": window, "softcap": softcap}
    out = kernel(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    out.backward(tensors.grad_out[rows] * first[:, None, None])

    def summed(grad: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(layout.num_tokens, *grad.shape[1:], dtype=torch.float32, device=device)
        return total.index_add_(0, rows, grad.float()).to(grad.dtype)

    packed_out = torch.zeros_like(tensors.q).index_copy(0, rows[first], out.detach()[first])
    return Outcome(packed_out, summed(q.grad), summed(k.grad), summed(v.grad))


def first_places(rows: list[int]) -> list[int]:
    places: dict[int, int] = {}
    for place, row in enumerate(rows):
        places.setdefault(row, place)
    return list(places.values())


def assert_as_close(packed: Outcome, replicated: Outcome, exact: Outcome) -> None:
    """Error norm at most 1.1x; the largest single error, one sample of a tail, at most 2x."""
    for name in ("out", "dq", "dk", "dv"):
        want = getattr(exact, name)
        ours = (getattr(packed, name).float() - want).abs()
        theirs = (getattr(replicated, name).float() - want).abs()
        assert ours.norm() <= 1.1 * theirs.norm(), f"{name}: {ours.norm():.3g} against {theirs.norm():.3g}"
        assert ours.max() <= 2 * theirs.max(), f"{name}: {ours.max():.3g} against {theirs.max():.3g} at worst"


@pytest.mark.parametrize("window", [-1, 64, 800], ids=["full", "window in response", "window across fork"])
@pytest.mark.parametrize(
    ("name", "head_dim", "heads"),
    # flash-attn 4 compiles for a minute or more for every shape that it has not seen.
    [gpu_case(name, *shape, slow=name == "flash_attn_4" and shape != SHAPES[0]) for name in NAMES for shape in SHAPES],
)
def test_packed_bf16_is_as_exact_as_the_kernel_on_every_sequence_alone(
    name: str, head_dim: int, heads: tuple[int, int], window: int
) -> None:
    layout, kernel = BATCH.layout(), select_kernel(name, "cuda")
    tensors = random_tensors(layout.num_tokens, *heads, head_dim, seed=0, dtype=torch.bfloat16, device="cuda")
    exact = dense_outcome(tensors.to(torch.float32), layout, BATCH.sequences, window)
    packed = packed_outcome(tensors, layout, window, kernel)
    assert_as_close(packed, replicated_outcome(tensors, layout, BATCH, window, kernel), exact)


@pytest.mark.parametrize("compiled", [False, True], ids=["as they are", "heads first"])
@pytest.mark.parametrize(
    ("name", "head_dim", "heads"),
    [
        gpu_case("flash_attn_4", *SHAPES[0]),
        gpu_case("flash_attn_4", *SHAPES[1], slow=True),
        *[gpu_case("flash_attn_2", *shape) for shape in SHAPES],
    ],
)
def test_gradients_without_copies_of_roots_are_as_exact_as_the_kernel_on_every_sequence_alone(
    name: str, head_dim: int, heads: tuple[int, int], compiled: bool
) -> None:
    layout, kernel = SHORT.layout(), select_kernel(name, "cuda")
    copies = PackedRows.from_layout(layout, kernel, "cuda").copies
    assert copies is not None
    assert copies.backward is not None
    assert copies.backward.rest_index is not None
    tensors = random_tensors(layout.num_tokens, *heads, head_dim, seed=0, dtype=torch.bfloat16, device="cuda")
    exact = dense_outcome(tensors.to(torch.float32), layout, SHORT.sequences)
    packed = packed_outcome(tensors, layout, kernel=kernel.for_compiled_layers() if compiled else kernel)
    assert_as_close(packed, replicated_outcome(tensors, layout, SHORT, -1, kernel), exact)


@gpu_kernels("flash_attn_4", "flash_attn_2")
@pytest.mark.parametrize("batch", [SHORT, BATCH], ids=["without copies of trunks", "all copied"])
def test_gradients_for_layers_compiled_for_any_number_of_rows_lie_heads_first(name: str, batch: Batch) -> None:
    layout, kernel = batch.layout(), select_kernel(name, "cuda").for_compiled_layers()
    tensors = random_tensors(layout.num_tokens, 16, 4, 128, seed=1, dtype=torch.bfloat16, device="cuda")
    rows = [x.requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
    seen: list[torch.Tensor] = []
    for x in rows:
        x.register_hook(seen.append)
    packed = PackedRows.from_layout(layout, kernel, "cuda")
    packed.attend_packed(*rows, AttentionOptions(0.1)).backward(tensors.grad_out)
    assert len(seen) == 3
    assert all(gradient.transpose(0, 1).is_contiguous() for gradient in seen)


def test_gradients_of_copies_are_added_up_however_they_lie() -> None:
    """Parts of chains sum what a kernel has written heads first, for layers that are compiled."""
    index = GatherIndex.from_layout(SHORT.layout(), "cuda")
    grad = torch.randn(len(index.rows), 3, 24, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    heads_first = grad.transpose(0, 1).contiguous().transpose(0, 1)
    expected = sum_over_readers(grad.cpu(), to_cpu(index), torch.float32)
    for given in (grad, heads_first):
        total = torch.empty(3, len(index.row_segment), 24, device="cuda").transpose(0, 1)
        assert sum_over_readers(given, index, torch.float32, total) is total
        torch.testing.assert_close(total.cpu(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(sum_over_readers(given, index, torch.float32), total)
    assert torch.equal(sum_over_readers(grad[:, 0, 0], index, torch.float32), total[:, 0, 0])


def to_cpu(index: GatherIndex) -> GatherIndex:
    return GatherIndex(*(getattr(index, field.name).cpu() for field in fields(index)))


@gpu_kernels("flash_attn_4", "flash_attn_3", "torch_varlen")
@pytest.mark.skipif(bool(kernel_obstacle("flash_attn_2", "cuda")), reason="flash-attn 2 is the yardstick")
def test_every_kernel_is_as_exact_as_flash_attn_2(name: str) -> None:
    layout = BATCH.layout()
    tensors = random_tensors(layout.num_tokens, 16, 4, 128, seed=3, dtype=torch.bfloat16, device="cuda")
    exact = dense_outcome(tensors.to(torch.float32), layout, BATCH.sequences)
    stock = replicated_outcome(tensors, layout, BATCH, -1, select_kernel("flash_attn_2", "cuda"))
    assert_as_close(packed_outcome(tensors, layout, kernel=select_kernel(name, "cuda")), stock, exact)


def test_auto_takes_the_first_kernel_that_runs_here() -> None:
    assert select_kernel("auto", "cuda").name == next(name for name in NAMES if not kernel_obstacle(name, "cuda"))


@gpu_kernels("flash_attn_4", "flash_attn_3", "flash_attn_2")
@pytest.mark.parametrize("batch", [SHORT, BATCH], ids=["without copies of trunks", "all copied"])
def test_packed_capped_scores_are_as_exact_as_the_kernel_on_every_sequence_alone(name: str, batch: Batch) -> None:
    attend = load_kernel(name)
    if fault := cap_fault(attend, 128, "cuda"):
        pytest.skip(f"{name} {fault}")
    layout, kernel, softcap = batch.layout(), select_kernel(name, "cuda"), 1.5
    tensors = random_tensors(layout.num_tokens, 16, 4, 128, seed=0, dtype=torch.bfloat16, device="cuda")
    exact = dense_outcome(tensors.to(torch.float32), layout, batch.sequences, softcap=softcap)
    packed = packed_outcome(tensors, layout, kernel=kernel, softcap=softcap)
    assert_as_close(packed, replicated_outcome(tensors, layout, batch, -1, kernel, softcap), exact)


def test_softcap_on_torch_varlen_is_refused_and_not_ignored() -> None:
    kernel = select_kernel("torch_varlen", "cuda")
    q = torch.zeros(2, 1, 64, dtype=torch.bfloat16, device="cuda")
    bounds = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    with pytest.raises(NotImplementedError, match="no softcap"):
        kernel(q, q, q, bounds, bounds, 2, 2, softmax_scale=1.0, softcap=30.0)


def test_sdpa_on_a_gpu_is_exact_when_asked_for() -> None:
    layout = BATCH.layout()
    tensors = random_tensors(layout.num_tokens, 4, 2, 16, seed=0, dtype=torch.float32, device="cuda")
    expected = dense_outcome(tensors, layout, BATCH.sequences, 64)
    assert_equal(packed_outcome(tensors, layout, 64), expected, tolerance=1e-5)


@every_kernel
def test_changing_one_response_leaves_its_siblings_bit_equal(name: str) -> None:
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
    """Norms kept in float32 hand float32 to a kernel that has none."""
    layout, kernel = BATCH.layout(), select_kernel(name, "cuda")
    tensors = random_tensors(layout.num_tokens, 16, 4, 128, seed=2, dtype=torch.bfloat16, device="cuda")
    expected = packed_outcome(tensors, layout, kernel=kernel)
    wide = Tensors(tensors.q.float(), tensors.k.float(), tensors.v.float(), tensors.grad_out)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual = packed_outcome(wide, layout, kernel=kernel)
    assert torch.equal(actual.out, expected.out)
    torch.testing.assert_close(actual.dv.to(torch.bfloat16), expected.dv, rtol=0.02, atol=0.02)


def test_the_bf16_gradient_of_a_big_group_is_rounded_once_where_index_select_rounds_at_every_addition() -> None:
    group = BigGroup.on("cuda")
    assert torch.equal(group.gradient(lambda x: gather_rows(x, group.index)), group.exact)
    assert not torch.equal(group.gradient(lambda x: x.index_select(0, group.index.rows)), group.exact)


def test_gradients_of_a_tree_are_bit_equal_from_run_to_run() -> None:
    layout = BATCH.layout()
    index = GatherIndex.from_layout(layout, "cuda")
    grad = torch.randn(len(layout.kv_index), 4, 64, device="cuda").to(torch.bfloat16)

    def gradient() -> torch.Tensor:
        x = torch.zeros(layout.num_tokens, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        gather_rows(x, index).backward(grad)
        assert x.grad is not None
        return x.grad

    expected = torch.zeros(layout.num_tokens, 4, 64, dtype=torch.float64, device="cuda")
    expected.index_add_(0, index.rows, grad.double())
    torch.testing.assert_close(gradient().double(), expected, rtol=2**-8, atol=1e-6)
    assert torch.equal(gradient(), gradient())
