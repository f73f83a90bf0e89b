"""Selection of prefixes to read in place; gathered tokens are summed and rounded once."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given

from tests.attention.dense import cut
from tests.layout.tries import Batch, batch_of, batches
from tests.planning.configs import CONFIGS
from verl_pg_plugin.attention.gather import Gather, gather_tokens
from verl_pg_plugin.attention.plan import GATHERED_IN_BACKWARD, read_in_place
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.planning.memory import TokenBytes


@given(batches(with_classes=True))
def test_in_place_prefixes_leave_each_key_to_its_segment(batch: Batch) -> None:
    layout = batch.layout()
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut(monkeypatch, (12, 0))
        reads, rest = read_in_place(layout)
    assert bool(reads) == (layout.segment_parent >= 0).any()
    assert rest.sum() == layout.num_tokens


PROMPT = tuple(range(100, 200))


def group(num_responses: int, length: int, prompt: Sequence[int] = PROMPT) -> Batch:
    return batch_of(*[(prompt, range(1000 * i, 1000 * i + length)) for i in range(num_responses)])


@pytest.mark.parametrize(
    ("batch", "in_place"),
    [
        pytest.param(group(16, 2), 1, id="many short responses"),
        pytest.param(group(2, 30), 0, id="few long responses"),
        pytest.param(batch_of((PROMPT, (1, 2))), 0, id="one response"),
        pytest.param(group(16, 2, prompt=PROMPT[:64]), 0, id="prompt shorter than a block of keys"),
        pytest.param(group(2, 500, prompt=range(10**6, 10**6 + 50_000)), 1, id="two responses, long prompt"),
        pytest.param(group(2, 50_000), 0, id="two long responses, short prompt"),
    ],
)
def test_prefixes_are_read_in_place_to_save_gathered_keys(batch: Batch, in_place: int) -> None:
    assert len(read_in_place(batch.layout())[0]) == in_place


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_backward_stays_within_planned_bytes(name: str) -> None:
    """Per token on flash-attn 2, after the MLP's activations are freed and before its gradients exist."""
    config, experts = CONFIGS[name], getattr(CONFIGS[name], "num_experts_per_tok", 0)
    inner = experts * config.moe_intermediate_size if experts else config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, 2 * config.num_key_value_heads * config.head_dim
    gathered = 2 * kv + 2 * q  # keys and values, their gradients, and gradients of each query head
    # Gradients of the residual, the output, queries (bf16 and float32), keys and values.
    attention = config.hidden_size + q + q + 2 * q + kv + GATHERED_IN_BACKWARD * gathered
    mlp_kept = 3 * inner + 2 * experts * config.hidden_size
    assert 2 * (attention - mlp_kept) <= TokenBytes.of(config).gradients


LAYOUT = batch_of(((1, 2, 3), (4, 5)), ((1, 2, 3), (6,)), ((1, 2, 3), (4, 7)), ((8,), (9,))).layout()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gather_of(layout: PackedLayout, device: str) -> Gather:
    return Gather(torch.from_numpy(layout.kv_index).to(torch.int32).to(device), layout.num_tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_gradients_of_a_group_are_rounded_once(device: str) -> None:
    """Multiples of 1/128 below 2: bf16 holds each exactly, and float32 any sum of them in any order."""
    layout = batch_of(*[((1, 2), (10 + i,)) for i in range(64)]).layout()
    gather, generator = gather_of(layout, device), torch.Generator().manual_seed(0)
    grad = torch.randint(-255, 256, (len(layout.kv_index), 2, 100), generator=generator).to(device) / 128
    exact = torch.zeros(layout.num_tokens, 2, 100, device=device).index_add_(0, gather.tokens, grad).bfloat16()
    x = torch.zeros_like(exact, requires_grad=True)
    # On a CPU index_select is exact too.
    indexed = x[gather.tokens] if device == "cpu" else x.index_select(0, gather.tokens)
    ours, stock = (torch.autograd.grad(copies, x, grad.bfloat16())[0] for copies in (gather_tokens(x, gather), indexed))
    assert torch.equal(ours, exact)
    assert not torch.equal(stock, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_sums_take_any_memory_layout_and_repeat(device: str) -> None:
    gather, on_cpu = gather_of(LAYOUT, device), gather_of(LAYOUT, "cpu")
    grad = torch.randn(len(gather.tokens), 3, 24, generator=torch.Generator().manual_seed(0)).to(device)
    expected = torch.zeros(LAYOUT.num_tokens, 3, 24).index_add_(0, on_cpu.tokens, grad.cpu())
    for copied in (grad, grad.transpose(0, 1).contiguous().transpose(0, 1)):
        total = torch.empty(3, LAYOUT.num_tokens, 24, device=device).transpose(0, 1)
        again = torch.empty_like(total)
        gather.sum(copied, total)
        gather.sum(copied, again)
        torch.testing.assert_close(total.cpu(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(again, total)
        gather.sum(copied, again, add=True)
        torch.testing.assert_close(again, 2 * total, rtol=1e-6, atol=1e-6)
    x = torch.randn(LAYOUT.num_tokens, 24, device=device, requires_grad=True)
    copies = gather_tokens(x, gather)
    assert torch.equal(copies, x[gather.tokens.long()])
    (gradient,) = torch.autograd.grad(copies, x, grad[:, 0].T.contiguous().T)
    assert torch.equal(gradient, total[:, 0])
