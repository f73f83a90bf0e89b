"""Whether a kernel that takes ``softcap`` caps scores, found out by running it.

flash-attn can be built without capped scores, and such a build of flash-attn 2 does not refuse them: it leaves the
``tanh`` out and multiplies scores by the cap, in stock verl too. flash-attn 3 raises then; betas of flash-attn 4 had
wrong gradients of queries, and later ones raise for some heads and GPUs
(https://github.com/Dao-AILab/flash-attention/pull/2544). All of them are found when an engine is built.
"""

from collections.abc import Callable
from functools import cache

import torch

LENGTHS = (3, 200)
"""Two sequences, one of them longer than a kernel's block."""
SOFTCAP = 2.0
SCORES = 3.0
"""Standard deviation of the scores, so that the cap moves most of them."""
TOLERANCE = 0.1
"""Of a relative error. bf16 makes about 0.01, a kernel without caps 1.8 and more."""


@cache
@torch.inference_mode(False)
def cap_fault(attend: Callable[..., torch.Tensor], head_dim: int, device_type: str) -> str:
    """What a kernel does to capped scores or their gradients that it should not; empty if nothing.

    Two query heads share a key head. Windows are not looked at.

    Args:
        attend: a ``VarlenAttention``.
        head_dim: a width of heads that it takes.
        device_type: where it runs, in bf16 on a GPU and in float32 elsewhere.

    Raises:
        torch.OutOfMemoryError, torch.AcceleratorError: the device can do no more; all else is what the kernel refuses.
    """
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    drawn = torch.randn(6, sum(LENGTHS), head_dim, generator=torch.Generator().manual_seed(0), device="cpu")
    q_THD, k_KGD, v_KGD, grad_out = (x.transpose(0, 1) for x in drawn.to(device_type, dtype).split([2, 1, 1, 2]))
    rows = [q_THD.contiguous(), k_KGD.contiguous(), v_KGD.contiguous()]
    cu_seqlens = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, device=device_type)
    softmax_scale = SCORES / head_dim**0.5

    def of_kernel(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        longest = max(LENGTHS)
        options = {"softmax_scale": softmax_scale, "window_size": -1, "softcap": SOFTCAP}
        return attend(q_THD, k_THD, v_THD, cu_seqlens, cu_seqlens, longest, longest, **options)

    def written_out(*tensors: torch.Tensor) -> torch.Tensor:
        sequences = zip(*(x.split(LENGTHS) for x in tensors), strict=True)
        return torch.cat([_capped(q, k.expand_as(q), v.expand_as(q), softmax_scale) for q, k, v in sequences])

    try:
        found = _with_gradients(of_kernel, rows, grad_out.contiguous())
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # builds refuse with whatever comes to hand: RuntimeError, AssertionError
        return f"does not take capped scores (softcap): {type(error).__name__}: {str(error).strip().splitlines()[0]}"
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
