"""Select rows of a mini-batch, whatever way its jagged fields are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.attention.gather import send


class RowSelector:
    """Selects rows like ``tu.index_select_tensor_dict``, but reads every jagged field of the batch once.

    verl's function unbinds all rows of a field at every call, which for a thousand sequences in a hundred
    micro-batches takes longer than planning them. What fields of the same lengths have in common is found once, and
    rows that lie side by side are copied in one piece.

    Args:
        data: any batch; jagged fields are ragged in their second dimension or passed to verl's function.
    """

    def __init__(self, data: TensorDict) -> None:
        self._jagged: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}  # values of the fields with these bounds
        for name, field in data.items():
            if isinstance(field, torch.Tensor) and field.is_nested and getattr(field, "_ragged_idx", 1) == 1:
                self._jagged.setdefault(tuple(field.offsets().tolist()), {})[name] = field.values()
        self._rest = data.exclude(*(name for fields in self._jagged.values() for name in fields))

    def select(self, rows: list[int]) -> TensorDict:
        """These rows of the batch, in this order; fields of the same lengths have the same offsets."""
        selected = tu.index_select_tensor_dict(self._rest, rows)
        for bounds, fields in self._jagged.items():
            cut = _Cut.of(bounds, rows, next(iter(fields.values())).device)
            for name, values in fields.items():
                selected[name] = torch.nested.nested_tensor_from_jagged(
                    torch.cat([values[begin:end] for begin, end in cut.pieces]),
                    cut.offsets,
                    min_seqlen=cut.shortest,
                    max_seqlen=cut.longest,
                )
        return selected


@dataclass(frozen=True)
class _Cut:
    """Rows of a jagged field: where their values begin and end, those side by side as one, and their new offsets."""

    pieces: list[tuple[int, int]]
    offsets: torch.Tensor
    shortest: int
    longest: int

    @classmethod
    def of(cls, bounds: Sequence[int], rows: Sequence[int], device: torch.device) -> _Cut:
        pieces: list[tuple[int, int]] = []
        for row in rows:
            begin, end = bounds[row], bounds[row + 1]
            if pieces and pieces[-1][1] == begin:
                begin, _ = pieces.pop()
            pieces.append((begin, end))
        lengths = [bounds[row + 1] - bounds[row] for row in rows]
        offsets = send(torch.tensor([0, *lengths]).cumsum(0), device)
        return cls(pieces, offsets, min(lengths), max(lengths))


def without_gaps(data: TensorDict) -> TensorDict:
    """The same batch, with no jagged field that skips some of its values (``torch.nested.narrow`` makes such ones).

    verl's losses and everything here read values and offsets, between which nothing may be left out.
    """
    narrowed = {
        name: torch.nested.as_nested_tensor(list(field.unbind()), layout=torch.jagged)
        for name, field in data.items()
        if isinstance(field, torch.Tensor) and field.layout == torch.jagged and field.lengths() is not None
    }
    if not narrowed:
        return data
    compact = data.copy()
    for name, field in narrowed.items():
        compact[name] = field
    return compact


def with_ragged_tokens(data: TensorDict) -> TensorDict:
    """The same batch, with ``position_ids`` of several dimensions stored as (dimensions, tokens of all sequences).

    Where all B sequences have one length L, torch takes the dimensions for the ragged axis when verl's transfer queue
    puts the rows together, and stores (B * dimensions, L). ``verl.utils.tensordict_utils.maybe_fix_3d_position_ids`` of
    verl 0.9.1 then calls the last axis ragged without moving a number, and nothing can unbind the rows any more.
    """
    position_ids, input_ids = data.get("position_ids", None), data.get("input_ids", None)
    if position_ids is None or not (position_ids.is_nested and position_ids.dim() == 3 and input_ids.is_nested):
        return data
    values, lengths = position_ids.values(), set(input_ids.offsets().diff().tolist())
    if lengths != {values.shape[-1]} or len(data) == 1:
        return data
    rows = values.unflatten(0, (len(data), -1)).unbind()
    repaired = data.copy()
    repaired["position_ids"] = tu.nested_tensor_from_tensor_list(list(rows), ragged_idx=2)
    return repaired
