"""Packed mode with one fault in the layouts of shared prefixes, as a bug would put it there."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from verl_pg_plugin.engine.batch.sequences import Sequences
from verl_pg_plugin.engine.sharing_modes import PackedMode
from verl_pg_plugin.layout import PackedLayout

Fault = Callable[[PackedLayout], PackedLayout]


def no_fault(layout: PackedLayout) -> PackedLayout:
    return layout


@dataclass(frozen=True, kw_only=True)
class BrokenMode(PackedMode):
    """``fault`` happens to every layout that shares rows, and to no other."""

    fault: Fault = no_fault

    def lay_out(self, sequences: Sequences) -> PackedLayout:
        layout = super().lay_out(sequences)
        return self.fault(layout) if layout.shares_tokens else layout


def wrong_kv_row(layout: PackedLayout) -> PackedLayout:
    """Every segment reads its last ancestor's row twice in place of the first."""
    kv_index = layout.kv_index.copy()
    for segment in np.flatnonzero(layout.segment_start):
        start = layout.cu_seqlens_k[segment]
        kv_index[start] = kv_index[start + layout.segment_start[segment] - 1]
    return replace(layout, kv_index=kv_index)


def position_off_by_one(layout: PackedLayout) -> PackedLayout:
    """Segments that continue a prefix start one position late."""
    late = np.repeat(layout.segment_start > 0, np.diff(layout.cu_seqlens_q))
    return replace(layout, position_ids=layout.position_ids + late)


def sibling_visible(layout: PackedLayout) -> PackedLayout:
    """Segments see the one before theirs when both continue the same."""
    keys = np.split(layout.kv_index, layout.cu_seqlens_k[1:-1])
    for segment in range(1, len(keys)):
        start = layout.segment_start[segment]
        if start and layout.segment_parent[segment] == layout.segment_parent[segment - 1]:
            sibling = np.arange(*layout.cu_seqlens_q[segment - 1 : segment + 1])
            keys[segment] = np.concatenate([keys[segment][:start], sibling, keys[segment][start:]])
    return replace(
        layout, kv_index=np.concatenate(keys), cu_seqlens_k=np.concatenate([[0], np.cumsum([len(k) for k in keys])])
    )


def wrong_head_row(layout: PackedLayout) -> PackedLayout:
    """Responses read the head row after theirs."""
    return replace(layout, response_head=(layout.response_head + 1) % len(layout.head_index))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault for fault in (wrong_kv_row, position_off_by_one, sibling_visible, wrong_head_row)
}
