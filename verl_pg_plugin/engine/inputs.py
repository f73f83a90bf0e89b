"""Make the context, inputs and verl's fields for one forward, and map its outputs to verl's jagged positions."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import gather_outputs_and_unpad

from verl_pg_plugin.attention.cache import CacheAccess
from verl_pg_plugin.attention.context import ForwardContext, PackedAttention, PaddedGroupsAttention
from verl_pg_plugin.attention.kernels import Kernel
from verl_pg_plugin.layout import IntArray, Layout, PackedLayout, PaddedLayout, Sequences
from verl_pg_plugin.modalities import Kind, Modality
from verl_pg_plugin.transfer import send, to_device


class SequenceSelector:
    """Selects sequences like ``tu.index_select_tensor_dict`` and sends them without waiting for the device.

    verl's function unbinds all sequences of a field in every call, which takes longer than the planning. So fields that
    are ragged in their second dimension are read once here. ``TensorDict.to`` copies offsets from pageable memory and
    would wait for the previous backward.
    """

    def __init__(self, data: TensorDict) -> None:
        self._jagged: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}  # offsets -> values of fields with them
        data = data.exclude("position_ids", "multi_modal_inputs")  # no loss reads them
        for name, x in data.items():
            if isinstance(x, torch.Tensor) and x.is_nested and getattr(x, "_ragged_idx", 1) == 1:
                self._jagged.setdefault(tuple(x.offsets().tolist()), {})[name] = x.values()
        self._rest = data.exclude(*(name for fields in self._jagged.values() for name in fields))

    def take(self, indices: list[int], device: torch.device) -> TensorDict:
        """Return these sequences in this order; fields of equal lengths share their offsets."""
        rest = tu.index_select_tensor_dict(self._rest, indices)
        dense = {name: x for name, x in rest.items() if isinstance(x, torch.Tensor) and not x.is_nested}
        selected = rest.exclude(*dense).to(device)
        for name, x in dense.items():
            selected[name] = send(x, device)
        for bounds, fields in self._jagged.items():
            spans = [slice(bounds[i], bounds[i + 1]) for i in indices]
            lengths = [span.stop - span.start for span in spans]
            offsets = send(torch.tensor([0, *lengths]).cumsum(0), device)
            for name, values in fields.items():
                chosen = send(torch.cat([values[span] for span in spans]), device)
                selected[name] = torch.nested.nested_tensor_from_jagged(
                    chosen, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
                )
        return selected


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """A layout on the device, with int64 integers.

    Shape legend: G lines of S tokens (packed: one line), N labels of this rank, W columns that the LM head runs on, A
    labels of all Ulysses ranks, C outputs. With ``content``, as images, tokens and positions are those of all ranks,
    and the model takes its slice after its vision encoder.
    """

    layout: Layout
    context: ForwardContext  # passed to layers as ``prefix_grouper``
    input_ids: torch.Tensor  # (G, S)
    position_ids: torch.Tensor  # (G, S), or (P, G, S) of P dimensions
    head_columns: torch.Tensor  # (W,)
    head_place: torch.Tensor | None = None  # (N,) index of each label into (G * W,) columns; None if W = N
    labels: torch.Tensor  # (N,)
    label_sequence: torch.Tensor  # (N,) a sequence that contains the label
    label_index: torch.Tensor  # (N,) index of the token before the label into the concatenated sequences
    num_own: int = 0  # tokens of this rank
    all_labels: torch.Tensor | None = None  # (A,) index of the tokens with a label; None without Ulysses
    num_padding: int = 0  # tokens of all ranks that the layout does not have
    places: torch.Tensor | None = None  # router replay: index of all sequences' tokens into [cached | packed] tokens
    content: dict[str, Any] = field(default_factory=dict)  # other keywords of the model

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of a transformers decoder's ``forward``."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": None,
            "prefix_grouper": self.context,
            "use_cache": False,
            **self.content,
        }

    def at_labels(self, x_GWV: torch.Tensor) -> torch.Tensor:
        """Select (N, V), the tokens with a label, from (G, W, V)."""
        x_NV = x_GWV.flatten(0, 1)
        return x_NV if self.head_place is None else x_NV.index_select(0, self.head_place)

    def on_sequences(self, x_NC: torch.Tensor) -> torch.Tensor:
        """Scatter outputs of this rank's labels to (C, tokens of all sequences), where verl reads them.

        A collective under Ulysses.
        """
        if self.all_labels is not None:
            x_LC = x_NC.new_zeros(self.num_own, x_NC.shape[-1]).index_copy(0, self.head_columns, x_NC)
            # Each rank computes the whole loss. verl's gather multiplies gradients by the group's size, which FSDP's
            # mean over all ranks divides out.
            x_TC = gather_outputs_and_unpad(x_LC, gather_dim=0, group=self.context.group)
            x_NC = x_TC.index_select(0, self.all_labels)
        if self.context.cache is not None:
            x_NC = self.context.cache.join_outputs(x_NC)
        index, label = (to_device(at, x_NC.device) for at in (self.layout.response_index, self.layout.response_head))
        values_CL = x_NC.new_zeros(x_NC.shape[-1], self.layout.num_total_tokens)
        return values_CL.index_copy(1, index, x_NC.T.index_select(1, label))


def make_context(
    layout: Layout,
    kernel: Kernel,
    device: torch.device,
    group: dist.ProcessGroup | None,
    cache: CacheAccess | None = None,
    **of_layers: Any,
) -> ForwardContext:
    """Make the context of one forward; ``of_layers`` may have ``checkpoint`` and ``perturb``."""
    if isinstance(layout, PackedLayout):
        return PackedAttention(layout, kernel, cache, group, **of_layers)
    from prefix_grouper import PrefixGrouper  # https://github.com/johncaged/PrefixGrouper, for padded groups only

    return PaddedGroupsAttention(PrefixGrouper(layout.group_info, device=device), kernel, **of_layers)


def make_inputs(
    context: ForwardContext,
    layout: Layout,
    sequences: Sequences,
    modality: Modality,
    device: torch.device,
    shown: frozenset[Kind],
    token_multiple: int = 1,
) -> ModelInputs:
    """Send the inputs of this rank's forward to ``device`` without waiting for it.

    Args:
        layout: of ``sequences``, or of a prefix of the first one.
        shown: kinds of images that the vision encoder runs on, even if no token here shows one.
        token_multiple: pad to a multiple of it (verl's ``pad_to_length_bucket``).
    """
    if isinstance(layout, PaddedLayout):
        return _padded_inputs(context, layout, sequences, device, dict(modality.keywords))
    group = context.group
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    padding, content = modality.inputs(layout, sequences, shown)
    input_ids = np.append(layout.input_ids, np.array(padding, dtype=np.int64))
    num_tokens = len(input_ids)
    for multiple in (token_multiple, ranks):
        num_tokens = -(-num_tokens // multiple) * multiple
    num_own = num_tokens // ranks
    start, stop = rank * num_own, (rank + 1) * num_own

    def padded(values: IntArray) -> IntArray:
        return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, num_tokens - values.shape[-1])])

    own = slice(*np.searchsorted(layout.head_index, [start, stop]))
    columns = layout.head_index[own] - start
    if not len(columns):  # the head cannot run on zero tokens
        columns = np.zeros(1, dtype=np.int64)
    label_index = padded(layout.token_index)[start + columns]
    input_ids, position_ids = padded(input_ids), padded(layout.position_ids)
    if content is None:  # otherwise the model takes this rank's tokens itself
        input_ids, position_ids = input_ids[start:stop], position_ids[..., start:stop]
    return ModelInputs(
        layout=layout,
        context=context,
        input_ids=to_device(input_ids[None], device),
        position_ids=to_device(position_ids[..., None, :], device),
        head_columns=to_device(columns, device),
        labels=to_device(padded(layout.labels)[start + columns], device),
        label_sequence=to_device(_sequence_of(label_index, sequences), device),
        label_index=to_device(label_index, device),
        num_own=num_own,
        all_labels=to_device(layout.head_index, device) if group else None,
        num_padding=num_tokens - layout.num_tokens,
        content={**modality.keywords, **{name: send(tensor, device) for name, tensor in (content or {}).items()}},
    )


def _sequence_of(index: IntArray, sequences: Sequences) -> IntArray:
    return np.searchsorted(sequences.offsets, index, side="right") - 1


def _padded_inputs(
    context: ForwardContext, layout: PaddedLayout, sequences: Sequences, device: torch.device, content: dict[str, Any]
) -> ModelInputs:
    line, column = np.divmod(layout.head_index, layout.input_ids.shape[1])
    head_columns, place = np.unique(column, return_inverse=True)
    return ModelInputs(
        layout=layout,
        context=context,
        input_ids=to_device(layout.input_ids, device),
        position_ids=to_device(layout.position_ids, device),
        head_columns=to_device(head_columns, device),
        head_place=to_device(line * len(head_columns) + place, device),
        labels=to_device(layout.labels.reshape(-1)[layout.head_index], device),
        label_sequence=to_device(_sequence_of(layout.response_index, sequences), device),
        label_index=to_device(layout.response_index, device),
        content=content,
    )
