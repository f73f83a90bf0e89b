"""Attention when the rows are spread over a Ulysses sequence-parallel group.

Each rank holds a slice of the rows and all heads. Two all-to-alls around attention trade that for all rows and a
slice of the heads and back (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), so what attends in between is
what a single rank runs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from verl.utils.ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads

from verl_pg_plugin.attention.shared_rows import AttentionOptions, SharedRows


class UlyssesRows(SharedRows):
    """An equal slice of rows on each rank of a group.

    Attributes:
        over_all_rows: the rows as this rank would attend to them if it held all T.
        num_rows: rows of all slices that come out of the all-to-all, padding rows at their end included or not.
        group: the ranks that share the rows, in the order of their slices.
    """

    def __init__(self, over_all_rows: SharedRows, num_rows: int, group: dist.ProcessGroup) -> None:
        super().__init__(over_all_rows.layout)
        self.over_all_rows = over_all_rows
        self.num_rows = num_rows
        self.group = group

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """A collective that every rank of the group must enter.

        Args:
            query: (1, H, L, D) this rank's L rows; key, value: (1, G, L, D).

        Returns:
            (1, L, H, D), zero at padding rows.

        Raises:
            ValueError: the heads cannot be spread over the ranks.
        """
        sp_size, num_heads, num_kv_heads = dist.get_world_size(self.group), query.shape[1], key.shape[1]
        if num_heads % sp_size or (num_kv_heads % sp_size and sp_size % num_kv_heads):
            raise ValueError(
                f"{num_heads} query and {num_kv_heads} key/value heads cannot be spread over {sp_size} ranks; "
                "set ulysses_sequence_parallel_size to a divisor of both"
            )
        # A rank needs at least one key/value head of its own.
        repeats = max(sp_size // num_kv_heads, 1)
        local_query, local_key, local_value = (
            gather_seq_scatter_heads(x, seq_dim=2, head_dim=1, unpadded_dim_size=self.num_rows, group=self.group)
            for x in (query, key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1))
        )
        if options.sinks is not None:
            of_ranks = options.sinks.tensor_split(sp_size)
            options = replace(options, sinks=of_ranks[dist.get_rank(self.group)])
        out = self.over_all_rows.attend(local_query, local_key, local_value, options)
        return gather_heads_scatter_seq(out, head_dim=2, seq_dim=1, group=self.group)
