"""Triton kernels: attention of decode queries to shared prefixes, and its merge with attention to the rest.

Both run inside vLLM's CUDA graphs: grids do not depend on a batch's values, and work is read from ``Groups``.

Shapes: R requests, H query heads, G key/value heads, D head size, S splits of all requests.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from verl_pg_plugin.rollout.groups import Groups

BLOCK_M = 64
"""Queries of a work item: all query heads of one key/value head, of several requests."""
BLOCK_N = 64
"""Keys of a loop step; splits are multiples of it."""
NUM_STAGES = 3  # of the software pipeline that loads keys and values
HEADS = 4  # query heads that a program merges


class Partials(NamedTuple):
    """Attention to splits of prefixes, float32."""

    output: torch.Tensor  # (S, H, D)
    lse: torch.Tensor  # (S, H), base two


@triton.jit
def _attend_prefixes(
    query, query_row, query_head, key_cache, value_cache, cache_block, cache_slot, cache_head, block_table, table_row,
    size, place, order, prefix_lens, split_lens, num_splits, first_splits, first_items, num_items, output, lse,
    scale, softcap, num_requests, num_heads,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute every ``num_programs(0)``-th work item of one key/value head."""
    PER_TILE: tl.constexpr = BLOCK_M // RATIO
    every = tl.arange(0, GROUPS)
    starts = tl.load(first_items + every, mask=every < num_requests, other=2**31 - 1)
    kv_head, total = tl.program_id(1), tl.load(num_items)
    m, d, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_N)
    head = kv_head * RATIO + m % RATIO
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        group = tl.sum((starts <= item).to(tl.int32)) - 1  # groups without items start where the next one does
        group_size, length = tl.load(size + group), tl.load(split_lens + group)
        tiles = tl.cdiv(group_size, PER_TILE)
        local = item - tl.load(first_items + group)
        split, member = local // tiles, (local % tiles) * PER_TILE + m // RATIO
        stop = tl.minimum((split + 1) * length, tl.load(prefix_lens + group))
        is_query = (m < PER_TILE * RATIO) & (member < group_size)
        mask = is_query[:, None] & (d < HEAD_DIM)
        request = tl.load(order + tl.load(place + group) + member, mask=is_query, other=0)
        q = tl.load(query + request[:, None] * query_row + head[:, None] * query_head + d, mask=mask, other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weights = tl.zeros([BLOCK_M], tl.float32)
        for start in tl.range(split * length, stop, BLOCK_N, num_stages=STAGES):
            token = start + n
            is_key = (token < stop)[:, None] & (d < HEAD_DIM)
            block = tl.load(block_table + group * table_row + token // BLOCK_SIZE, mask=token < stop, other=0)
            place_in_cache = block.to(tl.int64) * cache_block + (token % BLOCK_SIZE) * cache_slot + kv_head * cache_head
            at = place_in_cache[:, None] + d
            score = tl.dot(q, tl.trans(tl.load(key_cache + at, mask=is_key, other=0.0))) * scale
            if HAS_SOFTCAP:
                score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
            score = tl.where((token < stop)[None, :], score * 1.4426950408889634, float("-inf"))  # powers of two
            larger = tl.maximum(largest, tl.max(score, 1))
            weight, fade = tl.exp2(score - larger[:, None]), tl.exp2(largest - larger)
            value = tl.load(value_cache + at, mask=is_key, other=0.0)
            acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None])
            weights = weights * fade + tl.sum(weight, 1)
            largest = larger
        slot = (tl.load(first_splits + request, mask=is_query, other=0) + split).to(tl.int64) * num_heads + head
        tl.store(output + slot[:, None] * HEAD_DIM + d, acc / weights[:, None], mask=mask)
        tl.store(lse + slot, largest + tl.log2(weights), mask=is_query)


@triton.jit
def _merge_splits(
    output, output_row, output_head, lse, lse_head, lse_row, split_output, split_lse, num_splits, first_splits,
    num_heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Merge ``HEADS`` heads of one request; write nothing if the request has no shared prefix."""
    request = tl.program_id(0)
    splits = tl.load(num_splits + request)
    if splits == 0:
        return
    head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)[None, :]
    is_head = head < num_heads
    mask = is_head[:, None] & (d < HEAD_DIM)
    at = output + request * output_row + head[:, None] * output_head + d
    acc = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    largest = tl.load(lse + request * lse_row + head * lse_head, mask=is_head, other=0.0) * 1.4426950408889634
    weights = tl.full([HEADS], 1.0, tl.float32)
    first = tl.load(first_splits + request).to(tl.int64)
    for split in tl.range(0, splits, num_stages=4):
        slot = (first + split) * num_heads + head
        part = tl.load(split_output + slot[:, None] * HEAD_DIM + d, mask=mask, other=0.0)
        part_lse = tl.load(split_lse + slot, mask=is_head, other=0.0)
        larger = tl.maximum(largest, part_lse)
        fade, weight = tl.exp2(largest - larger), tl.exp2(part_lse - larger)
        acc = acc * fade[:, None] + part * weight[:, None]
        weights = weights * fade + weight
        largest = larger
    tl.store(at, (acc / weights[:, None]).to(output.dtype.element_ty), mask=mask)


def attend_prefixes(
    query_RHD: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table_RM: torch.Tensor,
    groups: Groups,
    partials: Partials,
    *,
    scale: float,
    softcap: float,
    num_programs: int,
    max_requests: int,
) -> None:
    """Write attention of each request to the splits of its prefix to ``partials``.

    Args:
        key_cache, value_cache: (blocks, tokens of a block, G, D), contiguous in D.
        block_table_RM: blocks of whole requests; the leader's row is read.
        num_programs: programs for each key/value head.
        max_requests: of any batch, so that all batches run the same kernel.
    """
    num_heads, head_dim = query_RHD.shape[1:]
    _attend_prefixes[num_programs, key_cache.shape[2]](
        query_RHD, *query_RHD.stride()[:2], key_cache, value_cache, *key_cache.stride()[:3], block_table_RM,
        block_table_RM.stride(0), *groups, *partials, scale, softcap, len(groups.order), num_heads,
        RATIO=num_heads // key_cache.shape[2], HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=key_cache.shape[1], GROUPS=triton.next_power_of_2(max_requests), HAS_SOFTCAP=softcap > 0,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=NUM_STAGES, num_warps=4,
    )  # fmt: skip


def merge_splits(output_RHD: torch.Tensor, lse_HR: torch.Tensor, groups: Groups, partials: Partials) -> None:
    """Merge attention to prefixes into ``output``, attention to the rest, whose log-sum-exp is ``lse_HR``."""
    num_heads, head_dim = output_RHD.shape[1:]
    _merge_splits[len(groups.order), triton.cdiv(num_heads, HEADS)](
        output_RHD, *output_RHD.stride()[:2], lse_HR, *lse_HR.stride(), *partials, groups.num_splits,
        groups.first_splits, num_heads, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), HEADS=HEADS,
        num_warps=2,
    )  # fmt: skip
