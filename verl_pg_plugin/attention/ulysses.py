"""Packed attention when the rows are spread over a Ulysses sequence-parallel group.

Each rank holds a slice of the rows and all heads. Two all-to-alls around attention trade that for all rows and a
slice of the heads and back (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), so the packed op in between is
the one that a single rank runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from verl.utils.ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads

from verl_pg_plugin.attention.interface import packed_attention_forward
from verl_pg_plugin.attention.packed_attention import CallCounter


@dataclass(frozen=True)
class UlyssesAttention:
    """What every attention layer needs when each rank of a group holds an equal slice of the rows.

    Attributes:
        over_all_rows: what the layers would need if this rank held all T rows, a ``PackedAttention`` for instance.
        num_rows: rows of all slices that come out of the all-to-all, padding rows at their end included or not.
        group: the ranks that share the rows, in the order of their slices.
    """

    over_all_rows: Any
    num_rows: int
    group: dist.ProcessGroup

    @property
    def calls(self) -> CallCounter:
        """Counts the layers that attended, see ``PackedAttention``."""
        return self.over_all_rows.calls


def ulysses_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefix_grouper: UlyssesAttention,
    attend: Callable[..., tuple[torch.Tensor, None]] = packed_attention_forward,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the rows of all ranks of a group; a collective that every one of them must enter.

    Args:
        query: (1, H, L, D) this rank's L rows; key, value: (1, G, L, D).
        attention_mask, kwargs: handed to ``attend``.
        attend: computes all rows with a slice of the heads from ``prefix_grouper.over_all_rows``.

    Returns:
        (1, L, H, D), zero at padding rows, and None for the attention weights.

    Raises:
        ValueError: the heads cannot be spread over the ranks.
    """
    group, num_rows = prefix_grouper.group, prefix_grouper.num_rows
    sp_size, num_heads, num_kv_heads = dist.get_world_size(group), query.shape[1], key.shape[1]
    if num_heads % sp_size or (num_kv_heads % sp_size and sp_size % num_kv_heads):
        raise ValueError(
            f"{num_heads} query and {num_kv_heads} key/value heads cannot be spread over {sp_size} ranks; "
            "set ulysses_sequence_parallel_size to a divisor of both"
        )
    # A rank needs at least one key/value head of its own.
    repeats = max(sp_size // num_kv_heads, 1)
    local_query, local_key, local_value = (
        gather_seq_scatter_heads(x, seq_dim=2, head_dim=1, unpadded_dim_size=num_rows, group=group)
        for x in (query, key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1))
    )
    out, _ = attend(
        module,
        local_query,
        local_key,
        local_value,
        attention_mask,
        prefix_grouper=prefix_grouper.over_all_rows,
        **kwargs,
    )
    return gather_heads_scatter_seq(out, head_dim=2, seq_dim=1, group=group), None
