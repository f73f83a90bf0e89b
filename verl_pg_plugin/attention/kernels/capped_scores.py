"""Whether a kernel that takes ``softcap`` caps scores, found out by running it.

flash-attn can be built without capped scores, and such a build of flash-attn 2 does not refuse them: it leaves the
``tanh`` out and multiplies scores by the cap, in stock verl too. Betas of flash-attn 4 had wrong gradients of queries
(https://github.com/Dao-AILab/flash-attention/pull/2544). Both are refused before anything starts.
"""

from collections.abc import Callable

import torch

LENGTHS = (3, 200)
"""Two sequences, one of them longer than a kernel's block."""
SOFTCAP = 2.0
SCORES = 3.0
"""Standard deviation of the scores, so that the cap moves most of them."""
TOLERANCE = 0.1
"""Of a relative error. bf16 makes about 0.01, a kernel without caps 1.8 and more."""


def cap_fault(attend: Callable[..., torch.Tensor], head_dim: int, device_type: str) -> str:
    """What a kernel does to capped scores or their gradients that it should not; empty if nothing.

    Args:
        attend: a ``VarlenAttention``.
        head_dim: a width of heads that it takes.
        device_type: where it runs, in bf16 on a GPU and in float32 elsewhere.
    """
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    drawn = torch.randn(4, sum(LENGTHS), 1, head_dim, generator=torch.Generator().manual_seed(0))
    *rows, grad_out = drawn.to(device_type, dtype).unbind()
    cu_seqlens = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, device=device_type)
    softmax_scale = SCORES / head_dim**0.5

    def of_kernel(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        longest = max(LENGTHS)
        options = {"softmax_scale": softmax_scale, "window_size": -1, "softcap": SOFTCAP}
        return attend(q_THD, k_THD, v_THD, cu_seqlens, cu_seqlens, longest, longest, **options)

    def written_out(*tensors: torch.Tensor) -> torch.Tensor:
        sequences = zip(*(x.split(LENGTHS) for x in tensors), strict=True)
        return torch.cat([_capped(q, k, v, softmax_scale) for q, k, v in sequences])

    found = _with_gradients(of_kernel, rows, grad_out)
    wanted = _with_gradients(written_out, [x.float() for x in rows], grad_out.float())
    off = {
        name: ((got.float() - want).norm() / want.norm()).item()
        for name, got, want in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True)
    }
    # Not "greater than": an error may be nan.
    wrong = [f"{name} is off by {error:.0%}" for name, error in off.items() if not error < TOLERANCE]
    return f"does not cap scores (softcap) as it is built: {', '.join(wrong)}" if wrong else ""


def _capped(q_LHD: torch.Tensor, k_LHD: torch.Tensor, v_LHD: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    scores_HLL = SOFTCAP * torch.tanh(torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * (softmax_scale / SOFTCAP))
    later = torch.ones(scores_HLL.shape[1:], dtype=torch.bool, device=scores_HLL.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores_HLL.masked_fill(later, float("-inf")).softmax(-1), v_LHD)


def _with_gradients(
    attend: Callable[..., torch.Tensor], rows: list[torch.Tensor], grad_out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Output, and gradients of queries, keys and values."""
    with torch.enable_grad():
        rows = [x.detach().requires_grad_() for x in rows]
        out = attend(*rows)
        return out.detach(), *torch.autograd.grad(out, rows, grad_out)
