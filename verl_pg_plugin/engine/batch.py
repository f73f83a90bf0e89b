"""Check the settings of a mini-batch of verl and read its sequences."""

import math

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.config.keys import FROM_UPDATE, OLD_LOG_PROB
from verl_pg_plugin.issue import SHARING_OFF, BatchError
from verl_pg_plugin.layout import IntArray, Sequences
from verl_pg_plugin.modalities import TEXT, Modality
from verl_pg_plugin.planning.micro_batches import MicroBatchLimits

FUSED_OFF = "set actor_rollout_ref.model.use_fused_kernels=False"


def uses_top_k(data: TensorDict) -> bool:
    """Return True if the loss is ``forward_kl_topk``, which reads the student's logits at a teacher's top k."""
    return tu.get_non_tensor_data(data, "distillation_use_topk", default=False)


def old_log_prob_error(why: str) -> BatchError:
    """Return an error of an update that cannot provide old log-probs."""
    return BatchError(f"{OLD_LOG_PROB}=auto: {why}. Fix: {OLD_LOG_PROB}=always")


def check_batch(data: TensorDict, packed: bool, fused_head: bool) -> None:
    """Raise BatchError for settings that the mode or the LM head does not support."""
    if not packed and tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        raise BatchError(
            "use_dynamic_bsz=True: the padded prefix_grouper mode cannot split groups by tokens. Fix: set "
            "actor_rollout_ref.model.use_remove_padding=True (packed mode) or use_dynamic_bsz=False; in verl's SFT "
            "trainer model.use_remove_padding=True or data.use_dynamic_bsz=False"
        )
    if (size := tu.get_non_tensor_data(data, "force_group_size", default=1)) != 1:
        why = "shared prefixes change the order of sequences in a micro-batch"
        raise BatchError(f"force_group_size={size} keeps neighbours together, and {why}. Fix: {SHARING_OFF}")
    if not fused_head:
        return
    sums_squares = tu.get_non_tensor_data(data, "calculate_sum_pi_squared", default=False)
    missing = {
        "a temperature for each sample (only one for all)": isinstance(data["temperature"], torch.Tensor),
        "the logits that forward_kl_topk reads": uses_top_k(data),
        "the probabilities that calculate_sum_pi_squared=True reads": sums_squares,
    }
    for what, is_required in missing.items():
        if is_required:
            raise BatchError(f"use_fused_kernels=True does not provide {what}. Fix: {FUSED_OFF}")


def lacks_advantages(data: TensorDict) -> bool:
    """Return True if all advantages are NaN, as if computed from old log-probs that the update provides."""
    field = data.get("advantages", None) if tu.get_non_tensor_data(data, FROM_UPDATE, default=False) else None
    return field is not None and bool((field.values() if field.is_nested else field).isnan().all())


def limits_of(data: TensorDict, sp_size: int) -> MicroBatchLimits:
    """Return the limit that verl's flags select; raise BatchError if it is not set or below 1."""
    by_tokens = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
    name = "max_token_len_per_gpu" if by_tokens else "micro_batch_size_per_gpu"
    limit = tu.get_non_tensor_data(data, name, default=None)
    if not isinstance(limit, int | float) or not 1 <= limit < math.inf:
        raise BatchError(f"{name}={limit} bounds no micro-batch. Fix: set a number of at least 1")
    if by_tokens:
        return MicroBatchLimits(max_tokens=int(limit) * sp_size)
    return MicroBatchLimits(max_sequences=int(limit))


def read_sequences(data: TensorDict, modality: Modality = TEXT, rope_length_limit: int | None = None) -> Sequences:
    """Read what the layout needs from a batch in verl's no-padding format.

    ``input_ids`` are jagged, ``position_ids`` jagged or absent. ``prompts`` and ``responses`` are jagged (V1) or padded
    with an ``attention_mask`` (legacy). If both are absent, a jagged ``loss_mask`` covers all tokens (SFT). Raises
    BatchError for an invalid field or sequence, or one longer than ``rope_length_limit``, KeyError for a missing field.
    """
    if not len(data):
        raise BatchError("the mini-batch is empty on this rank. Fix: give every rank at least one sequence of each")
    supervised = not {"prompts", "responses"} & set(data.keys()) and data["loss_mask"].is_nested
    required = ("input_ids",) if supervised else ("input_ids", "prompts", "responses")
    if missing := [name for name in required if name not in data.keys()]:  # noqa: SIM118
        raise BatchError(
            f"the batch has no {' and no '.join(missing)}: packed mode must know where each response starts. Fix: pass "
            f"batches as verl's trainers make them, or {SHARING_OFF}"
        )
    input_ids = data["input_ids"]
    if not input_ids.is_nested:
        raise BatchError("input_ids must be a jagged nested tensor. Fix: convert with verl's left_right_2_no_padding")
    tokens, offsets = _numpy(input_ids.values()), _numpy(input_ids.offsets()).astype(np.int64)
    lengths = np.diff(offsets)
    if supervised:
        prompt_lengths = _before_loss(_numpy(data["loss_mask"].values()), offsets)
        response_lengths = lengths - prompt_lengths
    else:
        prompt_lengths, response_lengths = _lengths(data, "prompts"), _lengths(data, "responses")
    if (empty := prompt_lengths < 1).any():
        raise BatchError(f"sequence {int(np.argmax(empty))} has an empty prompt. Fix: drop such rows from the data")
    both = prompt_lengths + response_lengths
    if (differs := both != lengths).any():
        i = int(np.argmax(differs))
        raise BatchError(
            f"sequence {i}: input_ids has {lengths[i]} tokens, prompts and responses {both[i]}; both must agree"
        )
    if rope_length_limit is not None and (longest := lengths.max()) > rope_length_limit:
        raise BatchError(
            f"sequence {int(lengths.argmax())} has {longest} tokens; above {rope_length_limit} a model selects rotary "
            "frequencies by the longest sequence of a micro-batch. Fix: lower data.max_response_length (SFT: "
            f"max_length), or {SHARING_OFF}"
        )
    temperature, classes = tu.get(data, "temperature"), None
    if isinstance(temperature, torch.Tensor) and temperature.numel() > 1:
        classes = np.unique(_numpy(temperature.reshape(-1)), return_inverse=True)[1]
    sequences = modality.read(data, Sequences(tokens, offsets, prompt_lengths, classes))
    return sequences.responses_apart() if uses_top_k(data) else sequences


def _numpy(tensor: torch.Tensor) -> IntArray:
    return tensor.detach().cpu().numpy()


def _before_loss(loss_mask: IntArray, offsets: IntArray) -> IntArray:
    """Return (B,) numbers of tokens before the first loss token, at least 1; without one all but the last token."""
    counted_at = np.append(np.flatnonzero(loss_mask), offsets[-1])
    first = counted_at[np.searchsorted(counted_at, offsets[:-1])] - offsets[:-1]
    return np.maximum(np.minimum(first, np.diff(offsets) - 1), 1)


def _lengths(data: TensorDict, name: str) -> IntArray:
    """Return (B,) numbers of tokens in ``prompts`` or ``responses``, jagged or padded."""
    field = data[name]
    if field.is_nested:
        return _numpy(field.offsets().diff()).astype(np.int64)
    width = data["prompts"].shape[1]
    part = slice(width) if name == "prompts" else slice(width, None)
    return _numpy(data["attention_mask"][:, part].sum(dim=1)).astype(np.int64)


def normalize_batch(data: TensorDict) -> TensorDict:
    """Return a shallow copy of the batch whose jagged fields are stored as verl's losses and the layout read them.

    Fields of ``torch.nested.narrow``, which skip values, are copied. ``position_ids`` of D dimensions become (D, tokens
    of all sequences). verl's transfer queue stores (B * D, L) if all B sequences have length L, which
    ``maybe_fix_3d_position_ids`` of verl 0.9.1 does not reorder.
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
