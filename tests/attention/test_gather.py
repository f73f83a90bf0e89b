"""Gradients of shared rows are sums over a group: exact, and rounded once."""

from collections.abc import Callable

import torch

from tests.layout.tries import batch_of
from verl_pg_plugin.attention.gather import Gather, gather_tokens
from verl_pg_plugin.layout import PackedLayout

LAYOUT = batch_of(((1, 2, 3), (4, 5)), ((1, 2, 3), (6,)), ((1, 2, 3), (4, 7)), ((8,), (9,))).layout()


def gather_of(layout: PackedLayout, device: str) -> Gather:
    return Gather(torch.from_numpy(layout.kv_index).to(torch.int32).to(device), layout.num_tokens)


class BigGroup:
    """Gradient of the keys of a group of 64, and its sums over the copies of each row, rounded once to bf16.

    The gradient is in multiples of 1/128 below 2: bf16 holds each and float32 any sum of them, in whatever order.
    """

    def __init__(self, device: str) -> None:
        layout = batch_of(*[((1, 2), (10 + i,)) for i in range(64)]).layout()
        rows = torch.from_numpy(layout.kv_index).long()
        grad = torch.randint(-255, 256, (len(rows), 2, 100), generator=torch.Generator().manual_seed(0)).float() / 128
        exact = torch.zeros(layout.num_tokens, 2, 100).index_add_(0, rows, grad).to(torch.bfloat16)
        self.index, self.grad, self.exact = gather_of(layout, device), grad.to(device, torch.bfloat16), exact.to(device)

    def gradient(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.zeros_like(self.exact, requires_grad=True)
        return torch.autograd.grad(gather(x), x, self.grad)[0]


def test_gathered_rows_and_their_gradient_are_those_of_indexing() -> None:
    index = gather_of(LAYOUT, "cpu")
    x = torch.randn(LAYOUT.num_tokens, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gather_tokens(x, index), x[torch.from_numpy(LAYOUT.kv_index).long()])
    assert torch.autograd.gradcheck(lambda t: gather_tokens(t, index), (x,))


def test_the_bf16_gradient_of_a_big_group_is_rounded_once_where_indexing_rounds_at_every_addition() -> None:
    group = BigGroup("cpu")
    assert torch.equal(group.gradient(lambda x: gather_tokens(x, group.index)), group.exact)
    # On a CPU index_select is as exact as this; test_gpu.py asks it on a GPU.
    assert not torch.equal(group.gradient(lambda x: x[group.index.tokens]), group.exact)
