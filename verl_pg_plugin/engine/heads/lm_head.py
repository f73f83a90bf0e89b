"""What an actor reads from the logits, computed inside the head so that logits never have to leave it.

A transformers decoder ends with ``logits = lm_head(hidden_states)``. The head is given a job before the forward: to
return log-probs (and entropy) in place of logits, where FSDP has gathered its weight. How it does so is up to
``chunked_head`` and ``fused_head``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from verl.utils import torch_functional as verl_F


@dataclass(frozen=True)
class HeadJob:
    """What to compute for N head rows.

    Attributes:
        labels: (N,) int64.
        temperature: (N,) float32, or one for all rows.
        with_entropy, with_sum_pi_squared: outputs beside the log-probs.
        entropy_from_logits: verl's entropy function, as the engine configured it.
        checkpoint_entropy: recompute the entropy in the backward (verl's ``entropy_checkpointing``).
    """

    labels: torch.Tensor
    temperature: torch.Tensor | float
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
        if isinstance(self.temperature, torch.Tensor):
            logits_NV = logits_NV / self.temperature[rows].clamp(min=1e-8).to(logits_NV.dtype).unsqueeze(-1)
        elif self.temperature != 1.0:
            logits_NV = logits_NV / max(self.temperature, 1e-8)
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


class JobHead(ABC):
    """Stands in for the ``forward`` of a model's output embedding; without a job it is the linear layer."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.job: HeadJob | None = None
        head.forward = self.forward

    @abstractmethod
    def wants(self, job: HeadJob) -> bool:
        """Whether to do ``job`` here rather than hand out logits."""

    @abstractmethod
    def compute(self, hidden_NE: torch.Tensor, job: HeadJob) -> torch.Tensor:
        """(N, len(names)) float32 outputs of the job."""

    def takes(self, job: HeadJob) -> bool:
        """Whether the next forward will return the outputs of ``job`` in place of logits."""
        self.job = job if self.wants(job) else None
        return self.job is not None

    def forward(self, hidden_1NE: torch.Tensor) -> torch.Tensor:
        """(1, N, V) logits, or (1, N, len(names)) outputs of the job."""
        if self.job is None:
            return F.linear(hidden_1NE, self.head.weight, self.head.bias)
        job, self.job = self.job, None  # a job is for one forward
        return self.compute(hidden_1NE.squeeze(0), job).unsqueeze(0)
