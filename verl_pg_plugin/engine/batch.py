"""A mini-batch of verl: check its settings and read its sequences."""

import math

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.issue import SHARING_OFF, BatchError
from verl_pg_plugin.layout import IntArray, Sequences
from verl_pg_plugin.modalities import TEXT, Modality
from verl_pg_plugin.planning.micro_batches import MicroBatchLimits

FUSED_OFF = "set actor_rollout_ref.model.use_fused_kernels=False"


def uses_top_k(data: TensorDict) -> bool:
    """Whether the trainer asks for the losses of a teacher's top k (``forward_kl_topk``)."""
    return tu.get_non_tensor_data(data, "distillation_use_topk", default=False)


def check_batch(data: TensorDict, packed: bool, fused_head: bool) -> None:
    """Raise BatchError for settings that the mode or the head refuses."""
    if not packed and tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        raise BatchError(
            "use_dynamic_bsz=True cuts groups by their tokens, which the padded prefix_grouper mode does not support; "
            "set actor_rollout_ref.model.use_remove_padding=True (packed mode) or use_dynamic_bsz=False; in verl's SFT "
            "trainer model.use_remove_padding=True or data.use_dynamic_bsz=False"
        )
    if (together := tu.get_non_tensor_data(data, "force_group_size", default=1)) != 1:
        why = "shared prefixes put sequences of a micro-batch in an order of their own"
        raise BatchError(f"force_group_size={together} keeps neighbours together, and {why}; {SHARING_OFF}")
    if not fused_head:
        return
    sums = tu.get_non_tensor_data(data, "calculate_sum_pi_squared", default=False)
    missing = {
        "a temperature of each sample (it takes one for all)": isinstance(data["temperature"], torch.Tensor),
        "the logits that forward_kl_topk reads": uses_top_k(data),
        "the probabilities that calculate_sum_pi_squared=True sums": sums,
    }
    for what, is_wanted in missing.items():
        if is_wanted:
            raise BatchError(f"use_fused_kernels=True never has {what}; {FUSED_OFF}")


def limits_of(data: TensorDict, sp_size: int) -> MicroBatchLimits:
    """The limit that verl's flags select; raises BatchError where it is not set, or below 1."""
    by_tokens = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
    name = "max_token_len_per_gpu" if by_tokens else "micro_batch_size_per_gpu"
    limit = tu.get_non_tensor_data(data, name, default=None)
    if not isinstance(limit, int | float) or not 1 <= limit < math.inf:
        raise BatchError(f"{name}={limit} bounds no micro-batch; set at least 1")
    if by_tokens:
        return MicroBatchLimits(max_tokens=int(limit) * sp_size)
    return MicroBatchLimits(max_sequences=int(limit))


def read_sequences(data: TensorDict, modality: Modality = TEXT, rope_length_limit: int | None = None) -> Sequences:
    """Collect what the layout needs from a batch in verl's no-padding format.

    ``input_ids`` are jagged; ``prompts`` and ``responses`` jagged (V1) or padded beside an ``attention_mask`` (legacy),
    or neither is there and a jagged ``loss_mask`` covers all tokens (SFT); ``position_ids`` are jagged or absent.
    Raises BatchError for a sequence that is empty, padded, or longer than ``rope_length_limit``, and KeyError for a
    missing field.
    """
    if not len(data):
        raise BatchError("the mini-batch is empty on this rank; every rank needs at least one sequence of each")
    supervised = not {"prompts", "responses"} & set(data.keys()) and data["loss_mask"].is_nested
    needed = ("input_ids",) if supervised else ("input_ids", "prompts", "responses")
    if missing := [name for name in needed if name not in data.keys()]:  # noqa: SIM118
        raise BatchError(
            f"the batch has no {' and no '.join(missing)}: packed mode needs to know where each response starts; "
            f"pass batches as verl's trainers make them, or {SHARING_OFF}"
        )
    input_ids = data["input_ids"]
    if not input_ids.is_nested:
        raise BatchError("input_ids must be a jagged nested tensor; convert with verl's left_right_2_no_padding")
    tokens, offsets = _numpy(input_ids.values()), _numpy(input_ids.offsets()).astype(np.int64)
    lengths = np.diff(offsets)
    if supervised:
        prompt_lengths = _before_loss(_numpy(data["loss_mask"].values()), offsets)
        response_lengths = lengths - prompt_lengths
    else:
        prompt_lengths, response_lengths = _lengths(data, "prompts"), _lengths(data, "responses")
    if (empty := prompt_lengths < 1).any():
        raise BatchError(f"sequence {int(np.argmax(empty))} has an empty prompt; drop such rows from the data")
    both = prompt_lengths + response_lengths
    if (wrong := both != lengths).any():
        at = int(np.argmax(wrong))
        raise BatchError(
            f"sequence {at}: input_ids has {lengths[at]} tokens, prompts and responses together {both[at]}; they must "
            "be the same sequence"
        )
    if rope_length_limit is not None and (longest := lengths.max()) > rope_length_limit:
        raise BatchError(
            f"sequence {int(lengths.argmax())} has {longest} tokens; above {rope_length_limit} a micro-batch has "
            f"rotary frequencies of its longest; lower data.max_response_length (SFT: max_length), or {SHARING_OFF}"
        )
    temperature, classes = tu.get(data, "temperature"), None
    if isinstance(temperature, torch.Tensor) and temperature.numel() > 1:
        classes = np.unique(_numpy(temperature.reshape(-1)), return_inverse=True)[1]
    sequences = modality.read(data, Sequences(tokens, offsets, prompt_lengths, classes))
    return sequences.responses_apart() if uses_top_k(data) else sequences


def _numpy(tensor: torch.Tensor) -> IntArray:
    return tensor.detach().cpu().numpy()


def _before_loss(loss_mask: IntArray, offsets: IntArray) -> IntArray:
    """(B,) tokens in front of the first that the loss counts, at least one; all but the last where it counts none."""
    counted_at = np.append(np.flatnonzero(loss_mask), offsets[-1])
    first = counted_at[np.searchsorted(counted_at, offsets[:-1])] - offsets[:-1]
    return np.maximum(np.minimum(first, np.diff(offsets) - 1), 1)


def _lengths(data: TensorDict, name: str) -> IntArray:
    """(B,) tokens of ``prompts`` or ``responses``, jagged or padded."""
    field = data[name]
    if field.is_nested:
        return _numpy(field.offsets().diff()).astype(np.int64)
    mask, prompt_width = data["attention_mask"], data["prompts"].shape[1]
    part = mask[:, :prompt_width] if name == "prompts" else mask[:, prompt_width:]
    return _numpy(part.sum(dim=1)).astype(np.int64)


def regular(data: TensorDict) -> TensorDict:
    """A shallow copy of the batch, stored as verl's losses and everything here read it.

    No jagged field skips some of its values, as those of ``torch.nested.narrow`` do, and ``position_ids`` of several
    dimensions are stored as (dimensions, tokens of all sequences). Where all B sequences have one length L, verl's
    transfer queue stores (B * dimensions, L), and ``maybe_fix_3d_position_ids`` of verl 0.9.1 moves no number.
    """
    changed = data.copy()
    position_ids, input_ids = data.get("position_ids", None), data.get("input_ids", None)
    if position_ids is not None and position_ids.is_nested and position_ids.dim() == 3 and input_ids.is_nested:
        values, lengths = position_ids.values(), set(input_ids.offsets().diff().tolist())
        if lengths == {values.shape[-1]}:
            of_sequences = list(values.unflatten(0, (len(data), -1)).unbind())
            changed["position_ids"] = tu.nested_tensor_from_tensor_list(of_sequences, ragged_idx=2)
    for name, field in data.items():
        if isinstance(field, torch.Tensor) and field.layout == torch.jagged and field.lengths() is not None:
            changed[name] = torch.nested.as_nested_tensor(list(field.unbind()), layout=torch.jagged)
    return changed
