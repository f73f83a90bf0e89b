"""A mini-batch of verl: checked, read as sequences, cut into micro-batches and sent to the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.attention.gather import send
from verl_pg_plugin.layout import (
    Chunk,
    IntArray,
    Layout,
    PackedLayout,
    PrefixOrder,
    build_chunk_layout,
    build_packed_layout,
    build_padded_layout,
    build_prefix_order,
    idle_prefill,
)
from verl_pg_plugin.modalities import TEXT, Modality
from verl_pg_plugin.modalities.text import SHARING_OFF, BatchError, Content, counted
from verl_pg_plugin.planning.micro_batches import MicroBatchLimits

FUSED_OFF = "set actor_rollout_ref.model.use_fused_kernels=False"


def uses_top_k(data: TensorDict) -> bool:
    """Whether the trainer asks for the losses of a teacher's top k (``forward_kl_topk``)."""
    return tu.get_non_tensor_data(data, "distillation_use_topk", default=False)


def check_batch(data: TensorDict, packed: bool, fused_head: bool) -> None:
    """Raise BatchError for what a mini-batch lacks, and for settings that the mode or the head refuses."""
    if "loss_mask" not in data:
        raise BatchError("the batch has no loss_mask, whose ones verl sums over ranks; add it, as verl's trainers do")
    if not packed and tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        raise BatchError(
            "use_dynamic_bsz=True cuts groups by their tokens, which the padded prefix_grouper mode does not support; "
            "set actor_rollout_ref.model.use_remove_padding=True (packed mode) or use_dynamic_bsz=False"
        )
    if fused_head and isinstance(data["temperature"], torch.Tensor):
        raise BatchError(f"use_fused_kernels=True takes one temperature for all samples; {FUSED_OFF}")
    if fused_head and uses_top_k(data):
        raise BatchError(f"use_fused_kernels=True never has the logits that forward_kl_topk reads; {FUSED_OFF}")
    if fused_head and tu.get_non_tensor_data(data, "calculate_sum_pi_squared", default=False):
        raise BatchError(
            "use_fused_kernels=True never has the probabilities that calculate_sum_pi_squared=True sums; set it to "
            f"False, or {FUSED_OFF}"
        )


def limits_of(data: TensorDict, sp_size: int) -> MicroBatchLimits:
    """The limit that verl's flags select; raises BatchError where it is not set, or below 1."""
    by_tokens = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
    name = "max_token_len_per_gpu" if by_tokens else "micro_batch_size_per_gpu"
    limit = tu.get_non_tensor_data(data, name, default=None)
    if limit is None or limit < 1:
        raise BatchError(f"{name}={limit} bounds no micro-batch; set at least 1")
    if by_tokens:
        return MicroBatchLimits(max_tokens=int(limit) * sp_size)
    return MicroBatchLimits(max_sequences=int(limit))


@dataclass(frozen=True)
class Sequences:
    """B sequences of prompt + response.

    Attributes:
        content: their tokens, and what else they hold.
        prompt_lengths: (B,) leading tokens that are the prompt.
        classes: (B,) or None; sequences of different class, that is temperature, share nothing.
    """

    content: Content
    prompt_lengths: IntArray
    classes: IntArray | None

    @property
    def offsets(self) -> IntArray:
        """(B+1,) bounds of the sequences in the tokens of all, one after the other."""
        return self.content.offsets

    def order(self) -> PrefixOrder:
        """The sequences sorted, and what neighbours share."""
        return build_prefix_order(self.content.keys, self.offsets, self.classes, self.content.inside)

    def select(self, indices: list[int]) -> Sequences:
        """In the order of ``indices``."""
        classes = None if self.classes is None else self.classes[indices]
        return Sequences(self.content.select(indices), self.prompt_lengths[indices], classes)

    def unshared(self) -> Sequences:
        """The same sequences, none of which shares anything in packed mode."""
        return replace(self, classes=np.arange(len(self.prompt_lengths)))

    def responses_apart(self) -> Sequences:
        """The same sequences, no two of which share a token that predicts a response token.

        For losses that depend on what the response's own teacher said.
        """
        keys = self.content.keys.astype(np.int64)
        own = counted(self.offsets) >= np.repeat(self.prompt_lengths, np.diff(self.offsets))
        keys[own] = keys.max() + 1 + np.arange(own.sum())
        return replace(self, content=replace(self.content, keys=keys))

    @cached_property
    def prompt_groups(self) -> IntArray:
        """(B,) number of the prompt; sequences whose prompts are equal, and of one class, have the same."""
        classes = np.zeros(len(self.prompt_lengths), np.int64) if self.classes is None else self.classes
        spans = zip(classes.tolist(), self.offsets.tolist(), self.prompt_lengths.tolist(), strict=False)
        keys = [(group, self.content.keys[start : start + length].tobytes()) for group, start, length in spans]
        numbers: dict[tuple[int, bytes], int] = {}
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys])

    def lay_out(self, packed: bool) -> Layout:
        """The tokens of one forward: packed, or in upstream's padded groups."""
        if not packed:
            return build_padded_layout(self.content.tokens, self.offsets, self.prompt_lengths)
        return self.content.put_into(build_packed_layout(*self._arrays))

    def lay_out_chunk(self, chunk: Chunk, first_label: int, forward_only: bool) -> PackedLayout:
        """See ``build_chunk_layout``."""
        layout = build_chunk_layout(*self._arrays, chunk=chunk, first_label=first_label, forward_only=forward_only)
        prefill = layout.prefill and self.content.put_into(layout.prefill)
        return replace(self.content.put_into(layout), prefill=prefill)

    def lay_out_idle_prefill(self) -> PackedLayout:
        """See ``idle_prefill``."""
        return self.content.put_into(idle_prefill(self.content.keys, self.offsets, self.content.inside))

    @property
    def _arrays(self) -> tuple[IntArray, IntArray, IntArray, IntArray | None, IntArray | None]:
        return self.content.keys, self.offsets, self.prompt_lengths, self.classes, self.content.inside


def read_sequences(data: TensorDict, modality: Modality = TEXT) -> Sequences:
    """Collect what the layout needs from a batch in verl's no-padding format.

    Args:
        data: ``input_ids`` jagged; ``prompts`` and ``responses`` jagged (V1), or padded beside an ``attention_mask``
            (legacy), or neither of them and a jagged ``loss_mask`` over all tokens (SFT); ``position_ids`` jagged or
            absent; ``temperature``.
        modality: of the model.

    Raises:
        BatchError: no sequences, a field is missing or of the wrong type, or a prompt or response is empty.
    """
    if not len(data):
        raise BatchError("the mini-batch is empty on this rank; every rank needs at least one sequence of each")
    supervised = not {"prompts", "responses"} & set(data.keys()) and data["loss_mask"].is_nested
    needed = ("input_ids",) if supervised else ("input_ids", "prompts", "responses")
    missing = [name for name in needed if name not in data.keys()]  # noqa: SIM118
    if missing:
        raise BatchError(
            f"the batch has no {' and no '.join(missing)}: packed mode needs to know where each response starts; "
            f"pass batches as verl's trainers make them, or {SHARING_OFF}"
        )
    content = modality.read(data)
    if supervised:
        prompt_lengths = _before_loss(_numpy(data["loss_mask"].values()), content.offsets)
        response_lengths = np.diff(content.offsets) - prompt_lengths
    else:
        prompt_lengths, response_lengths = _lengths(data, "prompts"), _lengths(data, "responses")
    for name, lengths in (("prompt", prompt_lengths), ("response", response_lengths)):
        if (lengths < 1).any():
            fix = "filter empty prompts (data.filter_overlong_prompts)" if name == "prompt" else "drop the sequence"
            raise BatchError(f"sequence {int(np.argmax(lengths < 1))} has an empty {name}; {fix} before training")
    lengths, both = np.diff(content.offsets), prompt_lengths + response_lengths
    if (wrong := both != lengths).any():
        at = int(np.argmax(wrong))
        raise BatchError(
            f"sequence {at}: input_ids has {lengths[at]} tokens, prompts and responses together {both[at]}; they must "
            "be the same sequence"
        )
    temperature, classes = tu.get(data, "temperature"), None
    if isinstance(temperature, torch.Tensor) and temperature.numel() > 1:
        classes = np.unique(_numpy(temperature.reshape(-1)), return_inverse=True)[1]
    sequences = Sequences(content, prompt_lengths, classes)
    return sequences.responses_apart() if uses_top_k(data) else sequences


def _numpy(tensor: torch.Tensor) -> IntArray:
    return tensor.detach().cpu().numpy()


def _before_loss(loss_mask: IntArray, offsets: IntArray) -> IntArray:
    """(B,) tokens in front of the first that the loss counts, at least one; all but the last where it counts none."""
    counted_at = np.append(np.flatnonzero(loss_mask), offsets[-1])
    first = counted_at[np.searchsorted(counted_at, offsets[:-1])] - offsets[:-1]
    return np.clip(first, 1, np.diff(offsets) - 1)


def _lengths(data: TensorDict, name: str) -> IntArray:
    """(B,) tokens of ``prompts`` or ``responses``, jagged or padded."""
    field = data[name]
    if field.is_nested:
        return _numpy(field.offsets().diff()).astype(np.int64)
    if "attention_mask" not in data.keys():  # noqa: SIM118
        raise BatchError(f"{name} is padded but the batch has no attention_mask that says which tokens are real")
    mask, prompt_width = data["attention_mask"], data["prompts"].shape[1]
    part = mask[:, :prompt_width] if name == "prompts" else mask[:, prompt_width:]
    return _numpy(part.sum(dim=1)).astype(np.int64)


class SequenceSelector:
    """Selects sequences like ``tu.index_select_tensor_dict``, but reads every jagged field of the batch once.

    verl's function unbinds all sequences of a field at every call, which for a thousand sequences in a hundred
    micro-batches takes longer than planning them. It gets what is not ragged in its second dimension.
    """

    def __init__(self, data: TensorDict) -> None:
        self._jagged: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}  # values of the fields with these bounds
        for name, field in data.items():
            if _is_ragged(field):
                self._jagged.setdefault(tuple(field.offsets().tolist()), {})[name] = field.values()
        self._rest = data.exclude(*(name for fields in self._jagged.values() for name in fields))

    def select(self, indices: list[int]) -> TensorDict:
        """These sequences of the batch, in this order; fields of the same lengths have the same offsets."""
        selected = tu.index_select_tensor_dict(self._rest, indices)
        for bounds, fields in self._jagged.items():
            pieces: list[tuple[int, int]] = []
            for i in indices:
                begin, end = bounds[i], bounds[i + 1]
                if pieces and pieces[-1][1] == begin:
                    begin, _ = pieces.pop()  # neighbours are copied in one piece
                pieces.append((begin, end))
            lengths = [bounds[i + 1] - bounds[i] for i in indices]
            offsets = send(torch.tensor([0, *lengths]).cumsum(0), next(iter(fields.values())).device)
            for name, values in fields.items():
                chosen = torch.cat([values[begin:end] for begin, end in pieces])
                selected[name] = torch.nested.nested_tensor_from_jagged(chosen, offsets)
        return selected


def _is_ragged(field: object) -> bool:
    """Whether a field of a batch is jagged in its second dimension."""
    return isinstance(field, torch.Tensor) and field.is_nested and getattr(field, "_ragged_idx", 1) == 1


def on_device(micro_batch: TensorDict, device: torch.device) -> TensorDict:
    """The same micro-batch, regular and on the host, on ``device`` as soon as the work before it is done there.

    For ``micro_batch.to(device)`` torch copies the offsets of every jagged field from pageable memory: each of these
    copies waits for the backward of the micro-batch before, and the device then for the host, which only now begins to
    launch the forward.
    """
    sent: dict[str, torch.Tensor] = {}
    there: dict[int, torch.Tensor] = {}  # fields with the same offsets keep one raggedness
    for name, field in micro_batch.items():
        if _is_ragged(field):
            offsets = field.offsets()
            if id(offsets) not in there:
                there[id(offsets)] = send(offsets, device)
            lengths = offsets.diff()
            sent[name] = torch.nested.nested_tensor_from_jagged(
                send(field.values(), device),
                there[id(offsets)],
                min_seqlen=int(lengths.min()),
                max_seqlen=int(lengths.max()),
            )
        elif isinstance(field, torch.Tensor) and not field.is_nested:
            sent[name] = send(field, device)
    moved = micro_batch.exclude(*sent).to(device)
    for name, field in sent.items():
        moved[name] = field
    return moved


def regular(data: TensorDict) -> TensorDict:
    """The same batch, stored as verl's losses and everything here read it.

    No jagged field skips some of its values, as those of ``torch.nested.narrow`` do, and ``position_ids`` of several
    dimensions are stored as (dimensions, tokens of all sequences). Where all B sequences have one length L, torch takes
    the dimensions for the ragged axis when verl's transfer queue puts the sequences together, and stores
    (B * dimensions, L); ``maybe_fix_3d_position_ids`` of verl 0.9.1 then moves no number.
    """
    changed = data.copy()
    position_ids, input_ids = data.get("position_ids", None), data.get("input_ids", None)
    if position_ids is not None and position_ids.is_nested and position_ids.dim() == 3 and input_ids.is_nested:
        values, lengths = position_ids.values(), set(input_ids.offsets().diff().tolist())
        if lengths == {values.shape[-1]} and len(data) > 1:
            of_sequences = list(values.unflatten(0, (len(data), -1)).unbind())
            changed["position_ids"] = tu.nested_tensor_from_tensor_list(of_sequences, ragged_idx=2)
    for name, field in data.items():
        if isinstance(field, torch.Tensor) and field.layout == torch.jagged and field.lengths() is not None:
            changed[name] = torch.nested.as_nested_tensor(list(field.unbind()), layout=torch.jagged)
    return changed
