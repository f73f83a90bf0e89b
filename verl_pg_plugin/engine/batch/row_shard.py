"""The rows of a packed forward that this rank computes: all of them, or its slice under Ulysses."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from verl.utils.ulysses import gather_outputs_and_unpad

from verl_pg_plugin.layout.order import IntArray


@dataclass(frozen=True)
class RowShard:
    """An equal slice of the padded rows.

    Attributes:
        num_padded_rows: rows of all ranks of the group, those of the layout first; a multiple of the group's size.
        group: ranks that share the rows, in the order of their slices; None where this rank has all of them.
    """

    num_padded_rows: int
    group: dist.ProcessGroup | None = None

    @property
    def num_rows(self) -> int:
        """L: rows of this rank."""
        return self.num_padded_rows // (dist.get_world_size(self.group) if self.group else 1)

    @property
    def start(self) -> int:
        """The first of them."""
        return self.num_rows * dist.get_rank(self.group) if self.group else 0

    def take(self, values_T: IntArray) -> IntArray:
        """(L,) this rank's part of a value per row; zero at padding rows."""
        part = values_T[self.start : self.start + self.num_rows]
        return np.pad(part, (0, self.num_rows - len(part)))

    def pad(self, values: IntArray) -> IntArray:
        """(..., padded rows) a value (..., rows) per row of all ranks; zero at padding rows."""
        return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, self.num_padded_rows - values.shape[-1])])

    def own(self, rows: IntArray) -> IntArray:
        """Indices into ``rows``, which ascend, of those that are this rank's."""
        first, last = np.searchsorted(rows, [self.start, self.start + self.num_rows])
        return np.arange(first, last)

    def gather(self, x_LC: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks on each of them.

        Each rank then computes the whole loss, and verl's gather scales the gradients up by the size of the group, so
        that they are right after FSDP has averaged them over all ranks.
        """
        return gather_outputs_and_unpad(x_LC, gather_dim=0, group=self.group)
