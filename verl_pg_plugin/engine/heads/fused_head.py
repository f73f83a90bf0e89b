"""verl's fused linear cross entropy in place of the head (``model.use_fused_kernels``), on response rows only."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.architectures import fused_obstacle
from verl_pg_plugin.engine.batch.sequences import BatchError
from verl_pg_plugin.engine.heads.lm_head import HeadJob, JobHead

FUSED_OFF = "set actor_rollout_ref.model.use_fused_kernels=False"
FusedOutputs = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class FusedHead(JobHead):
    """Every job through verl's kernels, which never hold the logits of all rows."""

    def __init__(self, head: nn.Linear, fused: FusedOutputs) -> None:
        super().__init__(head)
        self.fused = fused

    @classmethod
    def install(cls, module: Any, backend: str | None) -> "FusedHead":
        """Put a fused head into a transformers model.

        Args:
            module: see ``head_obstacle``.
            backend: verl's ``model.fused_kernel_options.impl_backend``.

        Raises:
            ValueError: the model's head is not a plain matrix, or it does not come last.
        """
        obstacle = fused_obstacle(module)
        if obstacle:
            raise ValueError(f"use_fused_kernels=True: {obstacle}; {FUSED_OFF}")
        return cls(module.get_output_embeddings(), fused_outputs(backend))

    def wants(self, job: HeadJob) -> bool:
        return True

    def compute(self, hidden_NE: torch.Tensor, job: HeadJob) -> torch.Tensor:
        assert isinstance(job.temperature, float)
        log_probs, entropy = self.fused(hidden_NE, self.head.weight, job.labels, job.temperature)
        columns = [entropy, log_probs] if job.with_entropy else [log_probs]
        for column in columns:
            if column.requires_grad:
                # The Triton kernels insist on it, and the gradient of a column is strided.
                column.register_hook(torch.Tensor.contiguous)
        return torch.stack([column.to(log_probs.dtype) for column in columns], dim=-1)


def fused_outputs(backend: str | None) -> FusedOutputs:
    """(N,) log-probs and entropy from (N, E) hidden states, (V, E) weight, (N,) labels and a temperature.

    Which back ends this machine has is a rule (``config.rules.fused_backend``).
    """
    if backend == "triton":
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy  # needs Triton

        return lambda hidden, weight, labels, temperature: linear_cross_entropy(
            hidden, weight, labels, temperature, "none"
        )
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    # verl 0.9.0 has torch alone and takes no name.
    return FusedLinearForPPO() if backend == "torch" else FusedLinearForPPO(impl_backend=backend)


def check_fused_batch(data: TensorDict) -> None:
    """Refuse what verl's fused kernels do not compute, as verl's own engine does.

    Raises:
        BatchError: temperatures per sample, or ``calculate_sum_pi_squared``.
    """
    if isinstance(data["temperature"], torch.Tensor):
        raise BatchError(f"use_fused_kernels=True takes one temperature for all samples; {FUSED_OFF}")
    if tu.get_non_tensor_data(data, "calculate_sum_pi_squared", default=False):
        raise BatchError(
            "use_fused_kernels=True never has the probabilities that calculate_sum_pi_squared=True sums; set it to "
            f"False, or {FUSED_OFF}"
        )
