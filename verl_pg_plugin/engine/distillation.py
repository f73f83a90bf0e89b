"""verl's distillation from a teacher's top k, computed where the logits are.

For ``forward_kl_topk`` verl calls its loss twice: inside the forward with the student's logits, here of a chunk of
labels, and then with what that returned. Its numbers depend on what the response's own teacher said, so no response
token is shared (``Sequences.responses_apart``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

TOP_K_OUTPUTS = ("distillation_losses", "student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage")
"""What verl's loss returns of each token."""
LOSS_OF_LOGITS = "loss_of_logits"
"""Field of a mini-batch: the loss that reads its logits."""


def uses_top_k(data: TensorDict) -> bool:
    """Whether the trainer asks for the losses of the teacher's top k."""
    return tu.get_non_tensor_data(data, "distillation_use_topk", default=False)


@dataclass(frozen=True)
class TeacherTopK:
    """What the teacher said of N labels: (N, K) log-probs in nats and ids; ``loss`` is verl's, with its configs."""

    loss: Callable[..., Any]
    log_probs: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of_labels(cls, micro_batch: TensorDict, index: torch.Tensor) -> TeacherTopK:
        """``index`` (N,) is the place of each label's token in the sequences laid one after the other."""
        of_labels = (micro_batch[name].values().index_select(0, index) for name in ("teacher_logprobs", "teacher_ids"))
        return cls(tu.get_non_tensor_data(micro_batch, LOSS_OF_LOGITS, default=None), *of_labels)

    def outputs(self, logits_NV: torch.Tensor, part: slice) -> list[torch.Tensor]:
        """``TOP_K_OUTPUTS``, (N,) each, from the logits of the labels in ``part``."""
        # verl's loss takes this rank's equal part of what it is given, and all of this is of this rank.
        ranks = get_ulysses_sequence_parallel_world_size()
        bounds = torch.tensor([0, ranks * len(logits_NV)], device=logits_NV.device)
        teacher = {
            name: torch.nested.nested_tensor_from_jagged(values[part].repeat(ranks, 1), bounds)
            for name, values in (("teacher_logprobs", self.log_probs), ("teacher_ids", self.ids))
        }
        found = self.loss(student_logits=logits_NV.unsqueeze(0), data=teacher)
        return [found[name].squeeze(0) for name in TOP_K_OUTPUTS]
