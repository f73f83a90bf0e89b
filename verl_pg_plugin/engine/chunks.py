"""Hand the prefix of a split group from chunk to chunk, see ``attention.cache``.

Without gradient the chunks run in order, and each publishes keys, values and outputs for the next. In an update they
run in reverse: a *prefill* without gradient publishes what a chunk reads, the chunk's backward adds to the pending
gradients, and the chunk that computes the prefix with gradient, which comes later, takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from verl_pg_plugin.attention.cache import CacheAccess, CachedTokens, PrefixCache
from verl_pg_plugin.layout import Layout, PackedLayout


def consume(cache: PrefixCache, layout: Layout) -> list[CachedTokens]:
    """Take the tokens off the cache that a chunk of an update computes with gradient, before its prefill comes.

    Returns:
        Their pending gradients; the values are dropped, since the chunk computes them again.
    """
    if not isinstance(layout, PackedLayout) or not layout.is_chunk or not len(layout.publish):
        return []
    blocks = cache.pop(layout.publish_start)
    for block in blocks:
        block.values.clear()
    return blocks


def prefill_access(cache: PrefixCache, layout: PackedLayout) -> CacheAccess | None:
    """What a prefill reads and publishes; None for one that only keeps other ranks company."""
    return CacheAccess(layout, list(cache.blocks), _published(layout), prefill=True) if layout.is_chunk else None


def chunk_access(
    cache: PrefixCache, layout: Layout, consumed: list[CachedTokens], forward_only: bool
) -> CacheAccess | None:
    """What a chunk reads, publishes and consumes; None for an ordinary micro-batch."""
    if not isinstance(layout, PackedLayout) or not layout.is_chunk:
        return None
    return CacheAccess(layout, list(cache.blocks), _published(layout) if forward_only else None, consumed)


def keep_published(cache: PrefixCache, access: CacheAccess | None) -> None:
    """Put what a forward has published on the cache, in place of what it replaces there."""
    if access is None or access.publish is None:
        return
    cache.pop(access.layout.publish_start)
    if len(access.layout.publish):
        cache.push(access.publish)


def check_all_consumed(cache: PrefixCache) -> None:
    """To be asked at the end of an update.

    Raises:
        RuntimeError: tokens were published whose gradients nobody has taken.
    """
    if cache.num_tokens:
        raise RuntimeError(f"the gradients of {cache.num_tokens} cached tokens were never consumed")


def _published(layout: PackedLayout) -> CachedTokens:
    return CachedTokens(layout.publish_start, layout.publish_start + len(layout.publish))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A prefill runs the graphs that compiled layers have of old_log_prob; what else differs, dropout, is refused."""
    training = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, flag in training:
            part.training = flag
