"""Hand the prefix of a split group from chunk to chunk, see ``attention.cache``.

Without gradient the chunks run in order, and each publishes keys, values and outputs for the next. In an update they
run in reverse: a *prefill* without gradient publishes what a chunk reads, the chunk's backward adds to the pending
gradients, and the chunk that computes the prefix with gradient, which comes later, takes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_pg_plugin.attention.cache import CacheAccess, CachedTokens, PrefixCache
from verl_pg_plugin.layout import Layout, PackedLayout


def consume(cache: PrefixCache, layout: Layout) -> list[CachedTokens]:
    """Take the tokens off the cache that a chunk of an update computes with gradient, before its prefill comes.

    Returns:
        Their pending gradients; the values are dropped, since the chunk computes them again.
    """
    if not isinstance(layout, PackedLayout) or not len(layout.publish):
        return []
    blocks = cache.pop(layout.publish_start)
    for block in blocks:
        block.drop_values()
    return blocks


def access(
    cache: PrefixCache,
    layout: Layout,
    *,
    publishes: bool,
    consumed: Sequence[CachedTokens] = (),
    prefill: bool = False,
) -> CacheAccess | None:
    """What a chunk or a prefill reads, publishes and consumes; None for what neither reads nor publishes."""
    if not isinstance(layout, PackedLayout) or not layout.is_chunk:
        return None
    start = layout.publish_start
    publish = CachedTokens(start, start + len(layout.publish)) if publishes else None
    return CacheAccess(layout, list(cache), publish, consumed, prefill)


def keep_published(cache: PrefixCache, access: CacheAccess | None) -> None:
    """Put what a forward has published on the cache, in place of what it replaces there."""
    if access is None or access.publish is None:
        return
    cache.pop(access.layout.publish_start)
    if len(access.layout.publish):
        cache.push(access.publish)
