"""Gradients of shared rows are sums over a group: exact, and rounded once."""

import pytest
import torch

from tests.layout.tries import batch_of
from verl_pg_plugin.attention.gather import Gather, gather_tokens
from verl_pg_plugin.layout import PackedLayout

LAYOUT = batch_of(((1, 2, 3), (4, 5)), ((1, 2, 3), (6,)), ((1, 2, 3), (4, 7)), ((8,), (9,))).layout()

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gather_of(layout: PackedLayout, device: str) -> Gather:
    return Gather(torch.from_numpy(layout.kv_index).to(torch.int32).to(device), layout.num_tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_the_bf16_gradient_of_a_big_group_is_rounded_once_where_indexing_rounds_at_every_addition(device: str) -> None:
    """Of multiples of 1/128 below 2: bf16 holds each and float32 any sum of them, in whatever order."""
    layout = batch_of(*[((1, 2), (10 + i,)) for i in range(64)]).layout()
    gather, generator = gather_of(layout, device), torch.Generator().manual_seed(0)
    grad = torch.randint(-255, 256, (len(layout.kv_index), 2, 100), generator=generator).to(device) / 128
    exact = torch.zeros(layout.num_tokens, 2, 100, device=device).index_add_(0, gather.tokens, grad).bfloat16()
    x = torch.zeros_like(exact, requires_grad=True)
    # On a CPU index_select is as exact as this.
    indexed = x[gather.tokens] if device == "cpu" else x.index_select(0, gather.tokens)
    ours, stock = (torch.autograd.grad(copies, x, grad.bfloat16())[0] for copies in (gather_tokens(x, gather), indexed))
    assert torch.equal(ours, exact)
    assert not torch.equal(stock, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_copies_are_added_up_however_they_lie_and_alike_in_every_run(device: str) -> None:
    gather, on_cpu = gather_of(LAYOUT, device), gather_of(LAYOUT, "cpu")
    grad = torch.randn(len(gather.tokens), 3, 24, generator=torch.Generator().manual_seed(0)).to(device)
    expected = torch.zeros(LAYOUT.num_tokens, 3, 24).index_add_(0, on_cpu.tokens, grad.cpu())
    for given in (grad, grad.transpose(0, 1).contiguous().transpose(0, 1)):
        total = torch.empty(3, LAYOUT.num_tokens, 24, device=device).transpose(0, 1)
        again = torch.empty_like(total)
        gather.sum(given, total)
        gather.sum(given, again)
        torch.testing.assert_close(total.cpu(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(again, total)
        gather.sum(given, again, add=True)
        torch.testing.assert_close(again, 2 * total, rtol=1e-6, atol=1e-6)
    x = torch.randn(LAYOUT.num_tokens, 24, device=device, requires_grad=True)
    copies = gather_tokens(x, gather)
    assert torch.equal(copies, x[gather.tokens.long()])
    (found,) = torch.autograd.grad(copies, x, grad[:, 0].T.contiguous().T)
    assert torch.equal(found, total[:, 0])
