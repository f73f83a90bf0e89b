"""What an actor reads from the logits, in chunks of rows so that logits never fill the memory.

A transformers decoder ends with ``logits = lm_head(hidden_states)``. For many response rows times a vocabulary of
150k that tensor and its gradient are larger than everything else, so the head is given a job before the forward:
compute log-probs (and entropy) chunk by chunk inside the model, where FSDP has gathered the weight, and return
those instead. The backward recomputes the logits of one chunk at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from verl.utils import torch_functional as verl_F

HEAD_COMES_LAST = frozenset(
    {"llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
)
"""Model types whose logits are the head's output as it is; others scale or cap them, so they are not chunked."""


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
    def install(cls, module: Any, chunk_size: int) -> "ChunkedHead | None":
        """Put a chunked head into a transformers model; None where its logits are not the head's output."""
        head = module.get_output_embeddings()
        if chunk_size <= 0 or type(head) is not nn.Linear or module.config.model_type not in HEAD_COMES_LAST:
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
        hidden_NE = hidden_1NE.squeeze(0)
        chunks = []
        for start in range(0, len(hidden_NE), self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            chunks.append(
                checkpoint(_chunk, hidden_NE[rows], self.head.weight, self.head.bias, job, rows, use_reentrant=False)
            )
        return torch.cat(chunks).unsqueeze(0)


def _chunk(
    hidden_NE: torch.Tensor, weight_VE: torch.Tensor, bias_V: torch.Tensor | None, job: HeadJob, rows: slice
) -> torch.Tensor:
    return job.outputs(F.linear(hidden_NE, weight_VE, bias_V), rows)
