"""The head in chunks of rows, so that logits never fill the memory.

For many response rows times a vocabulary of 150k, the logits and their gradient are larger than everything else. The
backward recomputes the logits of one chunk at a time and adds the weight's gradient in float32, so that cutting rounds
no more than the one product it replaces.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl_pg_plugin.architectures import head_obstacle
from verl_pg_plugin.engine.heads.lm_head import HeadJob, JobHead

logger = logging.getLogger(__name__)


class ChunkedHead(JobHead):
    """Computes jobs chunk by chunk, but for those of up to two chunks: there, computing logits twice costs more."""

    def __init__(self, head: nn.Linear, chunk_size: int) -> None:
        super().__init__(head)
        self.chunk_size = chunk_size

    @classmethod
    def install(cls, module: Any, chunk_size: int) -> "ChunkedHead | None":
        """Put a chunked head into a transformers model; None, with a warning, where it could change the numbers.

        Args:
            module: see ``head_obstacle``.
            chunk_size: rows of logits held at once, or up to twice as many uncut; 0 for all of them.
        """
        if chunk_size <= 0:
            return None
        if obstacle := head_obstacle(module):
            logger.warning("logits of all response rows are held at once: %s", obstacle)
            return None
        return cls(module.get_output_embeddings(), chunk_size)

    def wants(self, job: HeadJob) -> bool:
        return len(job.labels) > 2 * self.chunk_size

    def compute(self, hidden_NE: torch.Tensor, job: HeadJob) -> torch.Tensor:
        return _ChunkedOutputs.apply(hidden_NE, self.head.weight, self.head.bias, job, self.chunk_size)


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
        wide = torch.promote_types(weight_VE.dtype, torch.float32)
        # A frozen head, as under LoRA, gets no gradient: as large as the weight, and a third of the backward.
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_NE) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VE, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for start in range(0, len(hidden_NE), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                logits = F.linear(hidden_NE[rows], weight_VE.detach(), None if bias_V is None else bias_V.detach())
                logits = logits.detach().requires_grad_()
                outputs = ctx.job.outputs(logits, rows)
            (grad_logits,) = torch.autograd.grad(outputs, logits, grad_NC[rows])
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits.to(weight_VE.dtype) @ weight_VE
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden_NE[rows].to(grad_logits.dtype))
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
