"""Learned sinks: the correction by log-sum-exp is attention with one more key; kernels without it are named."""

import pytest
import torch

from verl_pg_plugin.attention.kernels import specs
from verl_pg_plugin.attention.kernels.sdpa import attend
from verl_pg_plugin.attention.kernels import select_kernel

LENGTHS_Q, LENGTHS_K = [5, 1, 3], [5, 4, 9]


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def written_out(
    q_THD: torch.Tensor, k_KGD: torch.Tensor, v_KGD: torch.Tensor, sinks_H: torch.Tensor, window: int
) -> torch.Tensor:
    outputs, repeats = [], q_THD.shape[1] // k_KGD.shape[1]
    pieces = zip(q_THD.split(LENGTHS_Q), k_KGD.split(LENGTHS_K), v_KGD.split(LENGTHS_K), strict=True)
    for q_LHD, k_MGD, v_MGD in pieces:
        scores_HLM = torch.einsum("lhd,mhd->hlm", q_LHD, k_MGD.repeat_interleave(repeats, 1)) * 0.5
        num_q, num_k = scores_HLM.shape[1:]
        distance = torch.arange(num_k - num_q, num_k)[:, None] - torch.arange(num_k)
        hidden = (distance < 0) | (distance > window) if window >= 0 else distance < 0
        sinks = sinks_H[:, None, None].expand(-1, num_q, 1)
        joined = torch.cat([scores_HLM.masked_fill(hidden, -torch.inf), sinks], dim=-1).softmax(-1)
        outputs.append(torch.einsum("hlm,mhd->lhd", joined[..., :-1], v_MGD.repeat_interleave(repeats, 1)))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [-1, 2])
def test_outputs_and_gradients_are_those_of_one_more_key(window: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(sum(LENGTHS_Q), 4, 8), *(torch.randn(sum(LENGTHS_K), 2, 8) for _ in "kv"), torch.randn(4)]
    got, want = ([x.double().requires_grad_() for x in inputs] for _ in range(2))
    out = attend(
        *got[:3], bounds(LENGTHS_Q), bounds(LENGTHS_K), 5, 9, softmax_scale=0.5, window_size=window, sinks_H=got[3]
    )
    expected = written_out(*want, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, theirs in zip(got, want, strict=True):
        assert theirs.grad.abs().max() > 1e-2
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", specs.KERNELS)
def test_no_kernel_of_a_gpu_takes_them(name: str) -> None:
    needs = specs.AttentionNeeds(sinks=True)
    assert "takes no learned attention sinks" in specs.model_misfit(name, "cuda", needs)
    assert "sdpa" not in specs.model_misfit("auto", "cuda", needs), "a GPU's auto never takes the slow sdpa"


def test_a_cpu_takes_them() -> None:
    assert select_kernel("auto", "cpu", specs.AttentionNeeds(sinks=True)).name == "sdpa"
