"""Groups of a decode batch, compared with a search over all pairs of requests."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.block_tables import random_tree, uniform_groups
from verl_pg_plugin.rollout import groups as groups_module
from verl_pg_plugin.rollout.groups import Groups, find_groups, max_splits

BLOCK_SIZE = 4


def groups_by_search(table: torch.Tensor, lengths: torch.Tensor) -> dict[tuple[int, ...], list[int]]:
    """Return the requests of each prefix (a tuple of blocks) that several requests share."""
    full = [
        tuple(row[: max(length - 1, 0) // BLOCK_SIZE])
        for row, length in zip(table.tolist(), lengths.tolist(), strict=True)
    ]
    members = defaultdict(list)
    for request, blocks in enumerate(full):
        others = [other for number, other in enumerate(full) if number != request]
        shared = [k for k in range(1, len(blocks) + 1) if any(other[:k] == blocks[:k] for other in others)]
        if shared:
            members[blocks[: shared[-1]]].append(request)
    return {prefix: requests for prefix, requests in members.items() if len(requests) > 1}


def find(
    table: torch.Tensor, lengths: torch.Tensor, num_programs: int = 8, min_saved_tokens: int = 1
) -> tuple[Groups, torch.Tensor, torch.Tensor]:
    options = {"requests_per_tile": 4, "tile_tokens": 8, "num_programs": num_programs}
    return find_groups(table, lengths, BLOCK_SIZE, **options, min_saved_tokens=min_saved_tokens)


def check(table: torch.Tensor, lengths: torch.Tensor, num_programs: int = 8) -> int:
    """Compare with ``groups_by_search``; return the number of groups."""
    groups, rest_lens, rest_blocks = find(table, lengths, num_programs)
    expected = groups_by_search(table, lengths)
    by_request = {request: prefix for prefix, requests in expected.items() for request in requests}
    for request, length in enumerate(lengths.tolist()):
        blocks = len(by_request.get(request, ()))
        assert int(groups.prefix_lens[request]) == blocks * BLOCK_SIZE
        assert int(rest_lens[request]) == length - blocks * BLOCK_SIZE
        own = table[request, blocks : -(-length // BLOCK_SIZE)].tolist()
        assert rest_blocks[request, : len(own)].tolist() == own
        assert bool(groups.num_splits[request]) == (request in by_request)
    for requests in expected.values():
        first, leader = int(groups.place[requests[0]]), requests[0]
        assert groups.order[first : first + len(requests)].tolist() == requests
        assert int(groups.size[leader]) == len(requests)
    assert sorted(groups.order.tolist()) == list(range(len(lengths)))
    check_work(groups, expected, num_programs)
    return len(expected)


def check_work(groups: Groups, expected: dict[tuple[int, ...], list[int]], num_programs: int) -> None:
    """Check that every tile and split of a group is one work item, located as the kernel does."""
    items = []
    for item in range(int(groups.num_items[0])):
        leader = int((groups.first_items <= item).sum()) - 1
        tiles = -(-int(groups.size[leader]) // 4)
        split, tile = divmod(item - int(groups.first_items[leader]), tiles)
        start = split * int(groups.split_lens[leader])
        assert start < int(groups.prefix_lens[leader])
        items.append((leader, tile, split))
    wanted = [
        (requests[0], tile, split)
        for requests in expected.values()
        for tile in range(-(-len(requests) // 4))
        for split in range(int(groups.num_splits[requests[0]]))
    ]
    assert sorted(items) == sorted(wanted)
    for requests in expected.values():
        length, splits = int(groups.split_lens[requests[0]]), int(groups.num_splits[requests[0]])
        assert length % 8 == 0
        assert (splits - 1) * length < int(groups.prefix_lens[requests[0]]) <= splits * length
    slots = [
        slot
        for first, n in zip(groups.first_splits, groups.num_splits, strict=True)
        for slot in range(first, first + n)
    ]
    assert slots == list(range(len(slots)))
    assert len(slots) <= max_splits(len(groups.size), num_programs, 4)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32), requests=st.integers(1, 40), fanout=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    depth=st.integers(0, 12), padded=st.integers(0, 3), programs=st.sampled_from([1, 8, 33]),
)  # fmt: skip
def test_groups_of_random_trees(seed, requests, fanout, depth, padded, programs) -> None:
    table, lengths = random_tree(requests, BLOCK_SIZE, torch.Generator().manual_seed(seed), fanout=fanout, depth=depth)
    table = torch.cat([table, table.new_zeros(padded, table.shape[1])])
    check(table, torch.cat([lengths, lengths.new_zeros(padded)]), programs)


def test_groups_of_equal_requests_stale_entries_and_a_thousand_requests() -> None:
    table = torch.tensor([[5, 6, 7], [5, 6, 7], [9, 6, 7]], dtype=torch.int32)
    assert check(table[:2], torch.tensor([12, 12], dtype=torch.int32)) == 1
    assert check(table, torch.tensor([8, 9, 4], dtype=torch.int32)) == 1  # the third names 6 and 7 from an earlier step
    assert check(table, torch.tensor([4, 4, 1], dtype=torch.int32)) == 0  # no block is full before the new token
    table, lengths, _ = uniform_groups(64, 40, 8, 128, BLOCK_SIZE, torch.Generator().manual_seed(0))
    assert check(table, lengths, 33) == 128
    table, lengths = random_tree(1024, BLOCK_SIZE, torch.Generator().manual_seed(1), fanout=0.9)
    assert check(table, lengths, 33) > 100


@pytest.mark.parametrize(("prompts", "programs"), [(1, 33), (4, 33), (7, 33), (16, 33), (16, 66), (31, 33)])
def test_equal_groups_keep_all_programs_busy(prompts: int, programs: int) -> None:
    table, lengths, _ = uniform_groups(8192, 40, 4, prompts, BLOCK_SIZE, torch.Generator().manual_seed(0))
    groups, _, _ = find(table, lengths, programs)
    assert 0.75 * programs <= int(groups.num_items[0]) <= 2 * programs


def test_groups_that_save_too_little_are_not_shared() -> None:
    table, lengths, _ = uniform_groups(64, 40, 3, 2, BLOCK_SIZE, torch.Generator().manual_seed(0))
    assert int(find(table, lengths, min_saved_tokens=2 * 2 * 64)[0].num_items[0]) > 0
    groups, rest_lens, rest_blocks = find(table, lengths, min_saved_tokens=2 * 2 * 64 + 1)
    assert int(groups.num_items[0]) == int(groups.prefix_lens.sum()) == 0
    assert rest_lens.equal(lengths)
    assert rest_blocks.equal(table)


def test_blocks_with_a_common_counter_join_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "NUM_COUNTERS", 3)
    for seed in range(20):
        table, lengths = random_tree(12, BLOCK_SIZE, torch.Generator().manual_seed(seed), fanout=0.7)
        groups, _, _ = find(table, lengths)
        for prefix, requests in groups_by_search(table, lengths).items():
            assert all(int(groups.prefix_lens[request]) in (0, len(prefix) * BLOCK_SIZE) for request in requests)
        for request in range(12):
            blocks, begin = int(groups.prefix_lens[request]) // BLOCK_SIZE, int(groups.place[request])
            if blocks and groups.first_items[request] < groups.num_items[request]:
                members = groups.order[begin : begin + int(groups.size[request])]
                assert (table[members, :blocks] == table[request, :blocks]).all() or int(groups.order[begin]) != request
