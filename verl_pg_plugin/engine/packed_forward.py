"""Inputs and outputs of one packed forward: rows into the model, values back onto verl's jagged positions."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F
from verl.workers.config import FSDPEngineConfig

from verl_pg_plugin.attention import PackedAttention, VarlenKernel
from verl_pg_plugin.layout import PackedLayout


@dataclass(frozen=True)
class PackedForward:
    """A layout on the device, ready for the model. Legend: see ``PackedLayout``.

    Attributes:
        attention: what the attention layers need.
        input_ids, position_ids: (1, T) int64.
        head_rows: (N,) int64 rows the head runs on.
        labels: (N,) int64 label of each head row.
        response_index, response_head: (M,) int64.
        num_logical_tokens: length of verl's jagged values.
    """

    attention: PackedAttention
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    head_rows: torch.Tensor
    labels: torch.Tensor
    response_index: torch.Tensor
    response_head: torch.Tensor
    num_logical_tokens: int

    @classmethod
    def from_layout(cls, layout: PackedLayout, kernel: VarlenKernel, device: torch.device | str) -> "PackedForward":
        """Move what a forward needs to ``device``."""

        def to_device(array: Any) -> torch.Tensor:
            return torch.from_numpy(array).to(torch.int64).to(device, non_blocking=True)

        return cls(
            attention=PackedAttention.from_layout(layout, kernel, device),
            input_ids=to_device(layout.input_ids).unsqueeze(0),
            position_ids=to_device(layout.position_ids).unsqueeze(0),
            head_rows=to_device(layout.head_rows),
            labels=to_device(layout.labels[layout.head_rows]),
            response_index=to_device(layout.response_index),
            response_head=to_device(layout.response_head),
            num_logical_tokens=layout.num_logical_tokens,
        )

    def model_inputs(self) -> dict[str, Any]:
        """Keywords of a transformers decoder's ``forward``."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": None,
            "prefix_grouper": self.attention,
        }

    def to_jagged(self, values_N: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Spread values of head rows over the sequences, as verl reads them.

        Args:
            values_N: (N,) one value per head row.
            offsets: (B+1,) of verl's jagged ``input_ids``.

        Returns:
            Jagged (B, length); positions that verl never reads hold zero.
        """
        flat = values_N.new_zeros(self.num_logical_tokens)
        flat = flat.index_copy(0, self.response_index, values_N.index_select(0, self.response_head))
        return torch.nested.nested_tensor_from_jagged(flat, offsets)


def lm_outputs(
    logits_NV: torch.Tensor,
    forward: PackedForward,
    temperature_N: torch.Tensor | None,
    micro_batch: TensorDict,
    config: FSDPEngineConfig,
    entropy_from_logits: Any,
) -> dict[str, torch.Tensor]:
    """Log-probs, and entropy and sum of squared probabilities where asked for, through verl's own functions.

    Args:
        logits_NV: (N, V) logits of the head rows.
        forward: the packed forward they come from.
        temperature_N: (N,) or None where it is 1 for all rows.
        micro_batch: carries ``calculate_entropy`` and ``calculate_sum_pi_squared``.
        config: carries verl's entropy options.
        entropy_from_logits: verl's function that the engine selected (chunked or not, compiled or not).

    Returns:
        Jagged tensors under verl's names ``log_probs``, ``entropy``, ``sum_pi_squared``.
    """
    if temperature_N is not None:
        logits_NV = logits_NV / temperature_N.clamp(min=1e-8).to(logits_NV.dtype).unsqueeze(-1)
    calculate_entropy = tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False)
    values = {}
    if tu.get_non_tensor_data(micro_batch, "calculate_sum_pi_squared", default=False):
        values["sum_pi_squared"] = verl_F.calculate_sum_pi_squared_from_logits(logits_NV)
    if calculate_entropy:
        chunk = {}
        if config.entropy_from_logits_with_chunking:
            chunk = {"chunk_size": config.entropy_from_logits_chunk_size}
        if config.entropy_checkpointing:
            values["entropy"] = torch.utils.checkpoint.checkpoint(
                entropy_from_logits, logits_NV, use_reentrant=False, **chunk
            )
        else:
            values["entropy"] = entropy_from_logits(logits_NV, **chunk)
    # flash-attn's cross entropy may write the gradient over the logits only if nothing else reads them.
    values["log_probs"] = verl_F.logprobs_from_logits(
        logits=logits_NV, labels=forward.labels, inplace_backward=len(values) == 0
    )
    offsets = micro_batch["input_ids"].offsets()
    return {name: forward.to_jagged(values_N, offsets) for name, values_N in values.items()}
