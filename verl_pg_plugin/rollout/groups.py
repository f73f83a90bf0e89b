"""Find requests that share prefix blocks, from the block tables of a decode batch, on the device and without a sync.

With vLLM's prefix caching, equal blocks mean equal tokens up to the block's end. A request's shared prefix is its
leading blocks that other requests have too. Requests with the same last shared block form a group. If prefixes form a
tree, only its deepest level is shared.
"""

from typing import NamedTuple

import torch

NUM_COUNTERS = 1 << 20
"""Blocks are counted modulo this. A collision can only split a group, never join two."""
SPLIT_TOKENS = 2048
"""Tokens for each program from which on there are twice as many work items as programs."""


class Groups(NamedTuple):
    """Groups of a decode batch of R requests, each (R,) int32. A group's leader is its first request.

    A work item is a split of the prefix and a tile of the group's requests; they are stored at the leader's index.
    """

    size: torch.Tensor  # requests of the group
    place: torch.Tensor  # of the request in ``order``
    order: torch.Tensor  # requests, group by group
    prefix_lens: torch.Tensor  # shared tokens, 0 in a group of one
    split_lens: torch.Tensor  # tokens of a split
    num_splits: torch.Tensor  # of the prefix, 0 without one
    first_splits: torch.Tensor  # splits of all requests before
    first_items: torch.Tensor  # work items of all groups before
    num_items: torch.Tensor  # work items of all groups, R times


def find_groups(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    *,
    requests_per_tile: int,
    tile_tokens: int,
    num_programs: int,
    min_saved_tokens: int,
) -> tuple[Groups, torch.Tensor, torch.Tensor]:
    """Return the groups of a decode batch, and lengths (R,) and block table (R, M) of each request without its prefix.

    Args:
        block_table: (R, M) int32, the blocks of each request; entries after its last block are ignored.
        seq_lens: (R,) int32, tokens of each request, the current one included; 0 for a padded row.
        block_size: tokens of a block.
        requests_per_tile: requests of a work item.
        tile_tokens: multiple to which tokens of a split are rounded up.
        num_programs: work items that run at once, for one key/value head.
        min_saved_tokens: nothing is shared if the batch would save fewer token reads.
    """
    R, M = block_table.shape
    column = torch.arange(M, device=block_table.device)
    row = torch.arange(R, device=block_table.device)

    # The current token is in no shared block.
    is_full = column < ((seq_lens - 1).clamp(min=0) // block_size)[:, None]
    counter = torch.where(is_full, block_table, row[:, None] * M + column).long() % NUM_COUNTERS  # spreads zeros
    uses = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=block_table.device)
    uses = uses.scatter_add(0, counter.flatten(), is_full.flatten().int())
    depth = torch.where((uses[counter] > 1) & is_full, M, column).amin(1)
    last = block_table.gather(1, (depth - 1).clamp(min=0)[:, None])[:, 0]
    key = torch.where(depth > 0, last, -1 - row)

    is_same = key == key[:, None]
    size, leader = is_same.sum(1), torch.where(is_same, row, R).amin(1)
    prefix = torch.where(size > 1, depth * block_size, 0)
    is_leader = leader == row
    prefix = torch.where(torch.where(is_leader, 0, prefix).sum() >= min_saved_tokens, prefix, 0)
    by_group = leader * R + row
    place = (by_group < by_group[:, None]).sum(1)

    # Split prefixes evenly into num_programs work items, or twice as many.
    tiles = _ceil_div(size, requests_per_tile)
    read = torch.where(is_leader, tiles * prefix, 0).sum().clamp(min=1)
    programs = num_programs * (read // (num_programs * SPLIT_TOKENS)).clamp(1, 2)
    splits = (prefix * programs // read).clamp(min=1)
    split_lens = _ceil_div(_ceil_div(prefix, splits), tile_tokens) * tile_tokens
    splits = torch.where(prefix > 0, _ceil_div(prefix, split_lens.clamp(min=1)), 0)
    items = torch.where(is_leader, tiles * splits, 0)
    groups = Groups(
        size=size,
        place=place,
        order=torch.zeros_like(row).scatter(0, place, row),
        prefix_lens=prefix,
        split_lens=split_lens,
        num_splits=splits,
        first_splits=splits.cumsum(0) - splits,
        first_items=items.cumsum(0) - items,
        num_items=items.sum().expand(R),
    )
    rest = (column + (prefix // block_size)[:, None]).clamp(max=M - 1)
    return Groups(*(part.int() for part in groups)), (seq_lens - prefix).int(), block_table.gather(1, rest)


def max_splits(num_requests: int, num_programs: int, requests_per_tile: int) -> int:
    """Return the most splits that ``find_groups`` makes of all prefixes of a batch."""
    return num_requests + 2 * num_programs * requests_per_tile


def _ceil_div(a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
    return (a + b - 1) // b
