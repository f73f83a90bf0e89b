"""What an actor reads from the logits, in chunks of rows so that logits never fill the memory.

A transformers decoder ends with ``logits = lm_head(hidden_states)``. For many response rows times a vocabulary of
150k that tensor and its gradient are larger than everything else, so the head is given a job before the forward:
compute log-probs (and entropy) chunk by chunk inside the model, where FSDP has gathered the weight, and return
those instead. The backward recomputes the logits of one chunk at a time and adds the weight's gradient in float32, so
that cutting rounds no more than the one product it replaces.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from verl.utils import torch_functional as verl_F

logger = logging.getLogger(__name__)

HEAD_COMES_LAST = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types tested to return the head's output as it is; others may scale or cap it, so they are not chunked."""


@dataclass(frozen=True)
class HeadJob:
    """What to compute for N head rows.

    Attributes:
        labels: (N,) int64.
        temperature: (N,) float32, or None where it is 1 for all rows.
        with_entropy, with_sum_pi_squared: outputs beside the log-probs.
        entropy_from_logits: verl's entropy function, as the engine configured it.
        checkpoint_entropy: recompute the entropy in the backward (verl's ``entropy_checkpointing``).
    """

    labels: torch.Tensor
    temperature: torch.Tensor | None
    with_entropy: bool
    with_sum_pi_squared: bool
    entropy_from_logits: Callable[[torch.Tensor], torch.Tensor]
    checkpoint_entropy: bool = False

    @property
    def names(self) -> list[str]:
        """verl's names of the outputs, in the order of the columns of ``outputs``."""
        optional = {"sum_pi_squared": self.with_sum_pi_squared, "entropy": self.with_entropy}
        return [*(name for name, wanted in optional.items() if wanted), "log_probs"]

    def outputs(self, logits_NV: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """(N, len(names)) float32 from the logits of ``rows``, through verl's own functions."""
        if self.temperature is not None:
            logits_NV = logits_NV / self.temperature[rows].clamp(min=1e-8).to(logits_NV.dtype).unsqueeze(-1)
        columns = []
        if self.with_sum_pi_squared:
            columns.append(verl_F.calculate_sum_pi_squared_from_logits(logits_NV))
        if self.with_entropy and self.checkpoint_entropy:
            columns.append(checkpoint(self.entropy_from_logits, logits_NV, use_reentrant=False))
        elif self.with_entropy:
            columns.append(self.entropy_from_logits(logits_NV))
        # flash-attn's cross entropy may write the gradient over the logits only if nothing else reads them.
        columns.append(verl_F.logprobs_from_logits(logits_NV, self.labels[rows], inplace_backward=len(columns) == 0))
        return torch.stack([column.to(_result_dtype(column)) for column in columns], dim=-1)


def _result_dtype(column: torch.Tensor) -> torch.dtype:
    return torch.promote_types(column.dtype, torch.float32)


class ChunkedHead:
    """Stands in for the ``forward`` of a model's output embedding.

    Without a job, or for at most ``chunk_size`` rows, it is the linear layer. The job is set for one forward.
    """

    def __init__(self, head: nn.Linear, chunk_size: int) -> None:
        self.head = head
        self.chunk_size = chunk_size
        self.job: HeadJob | None = None

    @classmethod
    def install(cls, module: Any, chunk_size: int, is_lora: bool = False) -> "ChunkedHead | None":
        """Put a chunked head into a transformers model; None, with a warning, where it could change the numbers.

        Args:
            module: an unwrapped causal LM.
            chunk_size: rows of logits held at once; 0 for all of them.
            is_lora: PEFT will wrap the model, and may copy the head or add to its output.
        """
        if chunk_size <= 0:
            return None
        head = module.get_output_embeddings()
        obstacles = {
            f"model type {module.config.model_type} is not known to return the head's output": (
                module.config.model_type not in HEAD_COMES_LAST
            ),
            f"the head is a {type(head).__name__}": type(head) is not nn.Linear,
            "adapters may be attached to the head": is_lora,
        }
        reasons = [reason for reason, applies in obstacles.items() if applies]
        if reasons:
            logger.warning("logits of all response rows are held at once: %s", "; ".join(reasons))
            return None
        chunked = cls(head, chunk_size)
        head.forward = chunked.forward
        return chunked

    def takes(self, job: HeadJob) -> bool:
        """Whether the model will return the outputs of ``job`` in place of logits; sets it up if so."""
        self.job = job if len(job.labels) > self.chunk_size else None
        return self.job is not None

    def forward(self, hidden_1NE: torch.Tensor) -> torch.Tensor:
        """(1, N, V) logits, or (1, N, len(names)) outputs of the job."""
        if self.job is None:
            return F.linear(hidden_1NE, self.head.weight, self.head.bias)
        job, self.job = self.job, None
        outputs = _ChunkedOutputs.apply(hidden_1NE.squeeze(0), self.head.weight, self.head.bias, job, self.chunk_size)
        return outputs.unsqueeze(0)


class _ChunkedOutputs(torch.autograd.Function):
    """``job.outputs(linear(hidden, weight, bias))`` with the logits of one chunk of rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        job: HeadJob,
        chunk_size: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V)
        ctx.job, ctx.chunk_size = job, chunk_size
        device = hidden_NE.device.type
        ctx.autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
        }
        starts = range(0, len(hidden_NE), chunk_size)
        chunks = [slice(start, start + chunk_size) for start in starts]
        return torch.cat([job.outputs(F.linear(hidden_NE[rows], weight_VE, bias_V), rows) for rows in chunks])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_NC,) = grad_outputs
        hidden_NE, weight_VE, bias_V = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_NE)
        wide = torch.promote_types(weight_VE.dtype, torch.float32)
        grad_weight = torch.zeros(weight_VE.shape, dtype=wide, device=weight_VE.device)
        grad_bias = None if bias_V is None else torch.zeros(bias_V.shape, dtype=wide, device=bias_V.device)
        for start in range(0, len(hidden_NE), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                logits = F.linear(hidden_NE[rows], weight_VE.detach(), None if bias_V is None else bias_V.detach())
                logits = logits.detach().requires_grad_()
                outputs = ctx.job.outputs(logits, rows)
            (grad_logits,) = torch.autograd.grad(outputs, logits, grad_NC[rows])
            grad_hidden[rows] = grad_logits.to(weight_VE.dtype) @ weight_VE
            grad_weight += _product(grad_logits.t(), hidden_NE[rows].to(grad_logits.dtype), wide)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)
        bias_gradient = None if grad_bias is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight.to(weight_VE.dtype), bias_gradient, None, None


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` in ``dtype``, without rounding to theirs first."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)
