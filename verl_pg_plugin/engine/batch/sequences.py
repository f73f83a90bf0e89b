"""Read the sequences of a verl batch, or say what is wrong with it."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from tensordict import TensorDict

from verl_pg_plugin.layout import (
    Chunk,
    IntArray,
    PackedLayout,
    PrefixOrder,
    build_chunk_layout,
    build_packed_layout,
    build_prefix_order,
    idle_prefill,
)
from verl_pg_plugin.modalities import Content, Modality
from verl_pg_plugin.modalities.batch_error import SHARING_OFF, BatchError
from verl_pg_plugin.modalities.text import TEXT


@dataclass(frozen=True)
class Sequences:
    """B sequences of prompt + response.

    Attributes:
        content: their tokens, and what else they hold.
        prompt_lengths: (B,) leading tokens that are the prompt.
        classes: (B,) or None; sequences of different class must not share rows (they differ in temperature).
    """

    content: Content
    prompt_lengths: IntArray
    classes: IntArray | None

    @property
    def tokens(self) -> IntArray:
        """(N,) ids of all sequences, one after the other."""
        return self.content.tokens

    @property
    def offsets(self) -> IntArray:
        """(B+1,) their bounds."""
        return self.content.offsets

    def order(self) -> PrefixOrder:
        """The sequences sorted, and what neighbours share."""
        return build_prefix_order(self.content.keys, self.offsets, self.classes, self.content.inside)

    def select(self, rows: list[int]) -> "Sequences":
        """Some of the sequences, in the order of ``rows``."""
        return Sequences(
            content=self.content.select(rows),
            prompt_lengths=self.prompt_lengths[rows],
            classes=None if self.classes is None else self.classes[rows],
        )

    @cached_property
    def prompt_groups(self) -> IntArray:
        """(B,) number of the prompt; sequences whose prompts are equal, and of one class, have the same."""
        classes = np.zeros(len(self.prompt_lengths), np.int64) if self.classes is None else self.classes
        spans = zip(classes.tolist(), self.offsets.tolist(), self.prompt_lengths.tolist(), strict=False)
        numbers: dict[tuple[int, bytes], int] = {}
        keys = [(group, self.content.keys[start : start + length].tobytes()) for group, start, length in spans]
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def read_sequences(data: TensorDict, modality: Modality = TEXT) -> Sequences:
    """Collect what the layout needs from a batch in verl's no-padding format.

    Args:
        data: ``input_ids`` jagged; ``prompts`` and ``responses`` jagged (V1), or padded beside an
            ``attention_mask`` (legacy left-right padding); ``position_ids`` jagged or absent; ``temperature``.
        modality: of the model.

    Raises:
        BatchError: no sequences, or a field is missing, of the wrong type, or a prompt or response is empty.
    """
    if not len(data):
        raise BatchError("the mini-batch is empty on this rank; every rank needs at least one sequence of each")
    missing = [name for name in ("input_ids", "prompts", "responses") if name not in data.keys()]  # noqa: SIM118
    if missing:
        raise BatchError(
            f"the batch has no {' and no '.join(missing)}: packed mode needs to know where each response starts; "
            f"pass batches as verl's trainers make them, or {SHARING_OFF}"
        )
    content = modality.read(data)
    offsets = content.offsets
    prompt_lengths, response_lengths = _lengths(data, "prompts"), _lengths(data, "responses")
    for name, lengths in (("prompt", prompt_lengths), ("response", response_lengths)):
        if (lengths < 1).any():
            fix = "filter empty prompts (data.filter_overlong_prompts)" if name == "prompt" else "drop the row"
            raise BatchError(f"row {int(np.argmax(lengths < 1))} has an empty {name}; {fix} before training")
    wrong = prompt_lengths + response_lengths != np.diff(offsets)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BatchError(
            f"row {row}: input_ids has {int(np.diff(offsets)[row])} tokens, prompts and responses together "
            f"{int((prompt_lengths + response_lengths)[row])}; they must be the same sequence"
        )
    # Not get(), which hands a tensor out in the wrapper of what is no field.
    temperature = data["temperature"] if "temperature" in data.keys() else None  # noqa: SIM118
    classes = None
    if isinstance(temperature, torch.Tensor) and temperature.numel() > 1:
        classes = np.unique(_numpy(temperature.reshape(-1)), return_inverse=True)[1]
    return Sequences(content=content, prompt_lengths=prompt_lengths, classes=classes)


def lay_out_packed(sequences: Sequences) -> PackedLayout:
    """The packed rows of some sequences."""
    content = sequences.content
    layout = build_packed_layout(
        content.keys, content.offsets, sequences.prompt_lengths, sequences.classes, content.inside
    )
    return content.put_into(layout)


def lay_out_carried(sequences: Sequences, chunk: Chunk, first_label: int, forward_only: bool) -> PackedLayout:
    """The tokens of a chunk, see ``build_chunk_layout``."""
    content = sequences.content
    layout = build_chunk_layout(
        content.keys,
        content.offsets,
        sequences.prompt_lengths,
        sequences.classes,
        content.inside,
        chunk=chunk,
        first_label=first_label,
        forward_only=forward_only,
    )
    prefill = layout.prefill and content.put_into(layout.prefill)
    return replace(content.put_into(layout), prefill=prefill)


def lay_out_idle_export(sequences: Sequences) -> PackedLayout:
    """See ``idle_prefill``."""
    content = sequences.content
    return content.put_into(idle_prefill(content.keys, content.offsets, content.inside))


def _numpy(tensor: torch.Tensor) -> IntArray:
    return tensor.detach().cpu().numpy()


def _lengths(data: TensorDict, name: str) -> IntArray:
    """Tokens (B,) of ``prompts`` or ``responses``, jagged or padded."""
    field = data[name]
    if field.is_nested:
        return _numpy(field.offsets().diff()).astype(np.int64)
    if "attention_mask" not in data.keys():  # noqa: SIM118
        raise BatchError(f"{name} is padded but the batch has no attention_mask that says which tokens are real")
    mask, prompt_width = data["attention_mask"], data["prompts"].shape[1]
    part = mask[:, :prompt_width] if name == "prompts" else mask[:, prompt_width:]
    return _numpy(part.sum(dim=1)).astype(np.int64)
