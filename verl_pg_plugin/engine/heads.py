"""What an actor reads from the logits, computed inside the head so that logits never have to leave it.

A transformers decoder ends with ``logits = lm_head(hidden_states)``. The head is given a request before the forward: to
return log-probs (and entropy) in place of logits, where FSDP has gathered its weight. It computes them chunk by chunk,
since for many response tokens times a vocabulary of 150k the logits and their gradient are larger than everything else,
or by verl's fused linear cross entropy (``model.use_fused_kernels``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from verl.utils import torch_functional as verl_F

from verl_pg_plugin.architectures import fused_obstacle, head_obstacle
from verl_pg_plugin.engine.batch import FUSED_OFF
from verl_pg_plugin.engine.distillation import TOP_K_OUTPUTS, TeacherTopK

logger = logging.getLogger(__name__)
FusedKernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(N,) log-probs and entropy from (N, E) hidden states, (V, E) weight, (N,) labels and a temperature."""


@dataclass(frozen=True)
class LogProbRequest:
    """What to compute for N labels.

    Attributes:
        labels: (N,) int64.
        temperature: (N,) float32, or one for all labels.
        with_entropy, with_sum_pi_squared: outputs beside the log-probs.
        entropy_from_logits: verl's entropy function, as the engine configured it.
        checkpoint_entropy: recompute the entropy in the backward (verl's ``entropy_checkpointing``).
        top_k: what a teacher said, if the loss asks for its top k.
        with_log_probs: False where that is the whole loss.
    """

    labels: torch.Tensor
    temperature: torch.Tensor | float
    with_entropy: bool
    with_sum_pi_squared: bool
    entropy_from_logits: Callable[[torch.Tensor], torch.Tensor]
    checkpoint_entropy: bool = False
    top_k: TeacherTopK | None = None
    with_log_probs: bool = True

    @property
    def names(self) -> list[str]:
        """verl's names of the outputs, in the order of the columns of ``outputs``."""
        optional = {"sum_pi_squared": self.with_sum_pi_squared, "entropy": self.with_entropy}
        optional["log_probs"] = self.with_log_probs
        return [*(TOP_K_OUTPUTS if self.top_k else ()), *(name for name, wanted in optional.items() if wanted)]

    def outputs(self, logits_NV: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """(N, len(names)) float32 from the logits of the labels in ``part``, through verl's own functions."""
        if isinstance(self.temperature, torch.Tensor):
            logits_NV = logits_NV / self.temperature[part].clamp(min=1e-8).to(logits_NV.dtype).unsqueeze(-1)
        elif self.temperature != 1.0:
            logits_NV = logits_NV / max(self.temperature, 1e-8)
        columns = self.top_k.outputs(logits_NV, part) if self.top_k else []
        if self.with_sum_pi_squared:
            columns.append(verl_F.calculate_sum_pi_squared_from_logits(logits_NV))
        if self.with_entropy and self.checkpoint_entropy:
            columns.append(checkpoint(self.entropy_from_logits, logits_NV, use_reentrant=False))
        elif self.with_entropy:
            columns.append(self.entropy_from_logits(logits_NV))
        # flash-attn's cross entropy may write the gradient over the logits only if nothing else reads them.
        if self.with_log_probs:
            log_probs = verl_F.logprobs_from_logits(logits_NV, self.labels[part], inplace_backward=len(columns) == 0)
            columns.append(log_probs)
        return torch.stack([column.to(_wide(column.dtype)) for column in columns], dim=-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class LogProbHead:
    """Stands in for the ``forward`` of a model's output embedding; without a request it is the linear layer.

    Args:
        head: the output embedding, whose ``forward`` this replaces.
        chunk_size: labels whose logits are held at once. A request of up to two chunks is left to the linear layer,
            since computing logits twice costs more there.
        fused: computes every request, and ``chunk_size`` counts nothing.

    Attributes:
        request: what the next forward returns in place of logits; it is for one forward.
    """

    def __init__(self, head: nn.Linear, chunk_size: int = 0, fused: FusedKernel | None = None) -> None:
        self.head, self.chunk_size, self.fused = head, chunk_size, fused
        self.request: LogProbRequest | None = None
        head.forward = self.forward

    def takes(self, request: LogProbRequest) -> bool:
        """Whether the next forward will return the outputs of ``request`` in place of logits."""
        self.request = request if self.fused or len(request.labels) > 2 * self.chunk_size else None
        return self.request is not None

    def forward(self, hidden_1NE: torch.Tensor) -> torch.Tensor:
        """(1, N, V) logits, or (1, N, len(names)) outputs of the request."""
        request, self.request = self.request, None
        if request is None:
            return F.linear(hidden_1NE, self.head.weight, self.head.bias)
        hidden_NE = hidden_1NE.squeeze(0)
        if self.fused is not None:
            return _fused_outputs(self.fused, hidden_NE, self.head.weight, request).unsqueeze(0)
        return _ChunkedOutputs.apply(hidden_NE, self.head.weight, self.head.bias, request, self.chunk_size).unsqueeze(0)


def install_chunked_head(module: Any, chunk_size: int) -> LogProbHead | None:
    """Put a chunked head into a transformers model; None, with a warning, where it could change the numbers.

    Args:
        module: see ``head_obstacle``.
        chunk_size: see ``LogProbHead``; 0 for all logits at once.
    """
    if chunk_size <= 0:
        return None
    if obstacle := head_obstacle(module):
        logger.warning("logits of all response tokens are held at once: %s", obstacle)
        return None
    return LogProbHead(module.get_output_embeddings(), chunk_size)


def install_fused_head(module: Any, backend: str | None) -> LogProbHead:
    """Put verl's fused linear cross entropy into a transformers model.

    Args:
        module: see ``head_obstacle``.
        backend: verl's ``model.fused_kernel_options.impl_backend``; which ones a machine has is a rule of ``config``.

    Raises:
        ValueError: the model's head is not a plain matrix, or it does not come last.
    """
    if obstacle := fused_obstacle(module):
        raise ValueError(f"use_fused_kernels=True: {obstacle}; {FUSED_OFF}")
    return LogProbHead(module.get_output_embeddings(), fused=fused_kernel(backend))


def fused_kernel(backend: str | None) -> FusedKernel:
    """verl's, by the name of its back end."""
    if backend == "triton":
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy  # needs Triton

        return lambda hidden, weight, labels, temperature: linear_cross_entropy(
            hidden, weight, labels, temperature, "none"
        )
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return FusedLinearForPPO(impl_backend=backend)


def _fused_outputs(
    fused: FusedKernel, hidden_NE: torch.Tensor, weight_VE: torch.Tensor, request: LogProbRequest
) -> torch.Tensor:
    log_probs, entropy = fused(hidden_NE, weight_VE, request.labels, request.temperature)
    columns = [entropy, log_probs] if request.with_entropy else [log_probs]
    for column in columns:
        if column.requires_grad:
            # The Triton kernels insist on it, and the gradient of a column is strided.
            column.register_hook(torch.Tensor.contiguous)
    return torch.stack([column.to(log_probs.dtype) for column in columns], dim=-1)


class _ChunkedOutputs(torch.autograd.Function):
    """``request.outputs(linear(hidden, weight, bias))`` with the logits of one chunk of labels at a time.

    The backward recomputes the logits of one chunk at a time and adds the weight's gradient in float32, so that cutting
    rounds no more than the one product it replaces.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        request: LogProbRequest,
        chunk_size: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V)
        ctx.request, ctx.chunk_size = request, chunk_size
        device = hidden_NE.device.type
        ctx.autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
        }
        parts = [slice(start, start + chunk_size) for start in range(0, len(hidden_NE), chunk_size)]
        return torch.cat([request.outputs(F.linear(hidden_NE[part], weight_VE, bias_V), part) for part in parts])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_NC,) = grad_outputs
        hidden_NE, weight_VE, bias_V = ctx.saved_tensors
        wide = _wide(weight_VE.dtype)
        # A frozen head, as under LoRA, gets no gradient: as large as the weight, and a third of the backward.
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_NE) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VE, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for start in range(0, len(hidden_NE), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                logits = F.linear(hidden_NE[part], weight_VE.detach(), None if bias_V is None else bias_V.detach())
                logits = logits.detach().requires_grad_()
                outputs = ctx.request.outputs(logits, part)
            (grad_logits,) = torch.autograd.grad(outputs, logits, grad_NC[part])
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits.to(weight_VE.dtype) @ weight_VE
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden_NE[part].to(grad_logits.dtype))
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)
        narrowed = (None if grad is None else grad.to(weight_VE.dtype) for grad in (grad_weight, grad_bias))
        return grad_hidden, *narrowed, None, None


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b`` without rounding the product to the dtype of the factors first."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
