"""How the keys of packed rows are copied for an attention kernel, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_pg_plugin.attention.gather import GatherIndex, to_device
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.layout.trunk_reads import TrunkReads, read_trunks


@dataclass(frozen=True)
class Bounds:
    """Of a varlen problem with S segments: (S+1,) int32 on the device, and the longest segment in rows."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, layout: PackedLayout | PackedLayout | TrunkReads, device: torch.device | str) -> Bounds:
        """Sent to ``device``, without waiting for the copies."""
        return cls(
            to_device(layout.cu_seqlens_q, torch.int32, device),
            to_device(layout.cu_seqlens_k, torch.int32, device),
            layout.max_seqlen_q,
            layout.max_seqlen_k,
        )


@dataclass(frozen=True)
class WithoutTrunks:
    """Attention told apart, see ``layout.trunk_reads``.

    Attributes:
        rows, keys: queries that read trunks and the rows that hold these.
        trunks: bounds of that problem, which is not causal.
        rest: bounds of the problem without trunks, which is.
        rest_index: copies its keys; None where every row is a key of its own segment alone.
    """

    rows: slice
    keys: slice
    trunks: Bounds
    rest: Bounds
    rest_index: GatherIndex | None


@dataclass(frozen=True)
class KeyCopies:
    """Copies of a forward's keys, and how its backward does with fewer.

    Attributes:
        index: makes the copies.
        backward: None where the backward takes the same copies.
    """

    index: GatherIndex
    backward: WithoutTrunks | None = None

    @classmethod
    def of(cls, layout: PackedLayout, index: GatherIndex, device: torch.device | str) -> KeyCopies:
        """The backward does without copies of trunks where that is faster."""
        reads = read_trunks(layout)
        if reads is None:
            return cls(index)
        rest_index = GatherIndex.from_layout(reads.rest, device) if reads.rest.num_gathered_kv else None
        trunks, rest = Bounds.of(reads, device), Bounds.of(reads.rest, device)
        return cls(index, WithoutTrunks(reads.rows, reads.keys, trunks, rest, rest_index))
