"""Random block tables as vLLM's prefix caching makes them: a block id identifies all tokens up to its end."""

import torch


def random_tree(
    num_requests: int, block_size: int, generator: torch.Generator, *, fanout: float = 0.5, depth: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block table (R, M) and lengths (R,) of requests that fork from each other at random blocks.

    Each request copies some leading full blocks of an earlier one with probability ``fanout`` and adds up to ``depth``
    full blocks and a part of one. Blocks are numbered at random from 1; entries after a request's last are 0.
    """

    def draw(stop: int) -> int:
        return int(torch.randint(stop, (1,), generator=generator))

    rows: list[list[int]] = []
    lengths, next_block = [], 0
    for number in range(num_requests):
        row: list[int] = []
        if number and float(torch.rand(1, generator=generator)) < fanout:
            other = draw(number)
            row = rows[other][: draw((lengths[other] - 1) // block_size + 1)]
        own = draw(depth + 1) + 1
        length = (len(row) + own - 1) * block_size + draw(block_size) + 1
        row = [*row, *range(next_block, next_block + own)]
        next_block += own
        rows.append(row)
        lengths.append(length)
    names = (torch.randperm(next_block, generator=generator) + 1).tolist()
    table = torch.zeros(num_requests, max(map(len, rows)), dtype=torch.int32)
    for number, row in enumerate(rows):
        table[number, : len(row)] = torch.tensor([names[block] for block in row])
    return table, torch.tensor(lengths, dtype=torch.int32)


def uniform_groups(
    prompt: int, own: int, n: int, prompts: int, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return block table (R, M), lengths (R,) and the number of blocks of ``prompts`` groups in a random order."""
    shared, R = prompt // block_size, n * prompts
    rest = -(-(prompt + own) // block_size) - shared
    num_blocks = prompts * shared + R * rest + 1
    names = (torch.randperm(num_blocks - 1, generator=generator) + 1).int()
    heads, tails = names[: prompts * shared].view(prompts, shared), names[prompts * shared :].view(R, rest)
    table = torch.cat([heads.repeat_interleave(n, 0), tails], dim=1)
    lengths = prompt + torch.randint(1, own + 1, (R,), generator=generator).int()
    order = torch.randperm(R, generator=generator)
    return table[order], lengths[order], num_blocks
