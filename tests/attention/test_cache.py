"""The prefix KV cache extends a path, frees popped tokens, and sums pending gradients in float32."""

import numpy as np
import pytest
import torch

from tests.layout.tries import batch_of
from verl_pg_plugin.attention.cache import OUTPUTS, CacheAccess, CachedTokens, CacheKey, PrefixCache, StateExchange
from verl_pg_plugin.layout import Chunk, PackedLayout

KEYS = CacheKey(0, "k")
EXCHANGE = StateExchange.of(np.arange(0), publish=np.array([2]), published=np.array([[1]]), device="cpu")


def block(stop: int) -> CachedTokens:
    tokens, places = torch.arange(stop, dtype=torch.float32), (KEYS, OUTPUTS)
    return CachedTokens(0, stop, {p: tokens.clone() for p in places}, dict.fromkeys(places, -tokens))


def test_tokens_must_continue_the_path_and_replace_cached_ones() -> None:
    cache, layout = PrefixCache(), chunk(2, num_cached=1, num_kept=1, num_read_next=3)
    with pytest.raises(RuntimeError, match="do not continue 0 cached tokens"):
        cache.access(layout, publishes=True)
    cache.blocks.append(block(2))
    cache.access(layout, publishes=True).publish_values(KEYS, torch.zeros(4, 1))
    assert not cache.blocks[-1].pending, "no gradient follows"
    assert [(part.start, part.stop) for part in cache.blocks] == [(0, 1), (1, 3)]
    assert not cache.consume(layout)[0].values, "they are recomputed"


@pytest.mark.parametrize("kept", [[0], [4], [50], [97], list(range(90, 0, -10))], ids=str)
def test_popped_tokens_hold_no_memory(kept: list[int]) -> None:
    """A view of the first tokens would keep the whole prompt until the end of the group."""
    cache = PrefixCache()
    cache.blocks.append(block(100))
    for keep in kept:
        cache.access(chunk(2, num_read_next=2), publishes=False)
        cache.pop(keep)
        held = [x for part in cache.blocks for x in (*part.values.values(), *part.pending.values())]
        assert 16 * keep <= sum(x.untyped_storage().nbytes() for x in held) <= 2 * 16 * keep
    assert cache.peak_bytes == 16 * 100


def chunk(num_responses: int, first_label: int = 2, **place: int) -> PackedLayout:
    """Lay out responses of one token to the prompt 1 2 3, whose first two tokens are cached or published."""
    batch = batch_of(*[((1, 2, 3), (10 + i,)) for i in range(num_responses)])
    return batch.as_numbers.build_layout(Chunk(num_sequences=num_responses, **place), first_label)


def cached(dtype: torch.dtype) -> CachedTokens:
    tokens = CachedTokens(0, 2)
    for name in "kv":
        tokens.put(CacheKey(0, name), torch.zeros(2, 1, 1, dtype=dtype), has_gradient=True)
    tokens.put(OUTPUTS, torch.zeros(2, 1), has_gradient=True)
    return tokens


def test_gradients_of_cached_keys_are_summed_in_float32_over_chunks() -> None:
    tokens = cached(torch.bfloat16)
    access = CacheAccess(chunk(3, num_cached=2), read=[tokens])
    for total in (1.0, 2.0):
        own = access.exchange_gradients(KEYS, torch.tensor([1 + 1 / 512, 1.0, 5.0, 5.0, 5.0])[:, None, None])
        assert tokens.pending[KEYS].flatten().tolist() == [total * (1 + 1 / 512), total]
        assert own.flatten().tolist() == [5.0] * 3
    assert not tokens.pending[CacheKey(0, "v")].any()
    owner = CacheAccess(chunk(2, num_read_next=2), read=[], consumed=[tokens])
    own = owner.exchange_gradients(KEYS, torch.tensor([257.0, 1.0, 0.0, 0.0])[:, None, None])
    assert own.flatten().tolist() == [259 + 2 / 512, 3.0, 0.0, 0.0]
    assert KEYS not in tokens.pending, "a live graph must not keep it"


def test_prefills_publish_in_the_models_dtype_once_for_each_layer() -> None:
    publish = CachedTokens(0, 2)
    access = CacheAccess(chunk(2, num_read_next=2), read=[], publish=publish, prefill=True)
    own = torch.ones(4, 1, 1, dtype=torch.bfloat16)
    access.publish_values(KEYS, own)
    assert {values.dtype for values in publish.values.values()} == {torch.bfloat16}
    assert {pending.dtype for pending in publish.pending.values()} == {torch.float32}
    with pytest.raises(RuntimeError, match=r"layer_idx=0: two layers .* \+\+prefix_grouper\.prefix_cache=off"):
        access.publish_values(KEYS, own)
    access.exchange_states(CacheKey(0, "state"), own, EXCHANGE)
    with pytest.raises(RuntimeError, match=r"layer_idx=0: two layers .* \+\+prefix_grouper\.prefix_cache=off"):
        access.exchange_states(CacheKey(0, "state"), own, EXCHANGE)


def test_state_gradients_are_rounded_once_and_must_exist() -> None:
    access = CacheAccess(chunk(2, num_read_next=2), read=[], consumed=[cached(torch.float32)])
    access.consumed[0].pending[CacheKey(0, "state", 2)] = torch.tensor([[257.0]])  # between two numbers of bfloat16
    own = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    published, _ = access.exchange_states(CacheKey(0, "state"), own, EXCHANGE)
    assert torch.autograd.grad(published.sum(), own, retain_graph=True)[0].flatten().tolist() == [1.0, 258.0]
    with pytest.raises(KeyError, match="name='state', position=2"):
        published.sum().backward()


def test_head_output_gradients_are_not_changed_in_place() -> None:
    layout, tokens = chunk(2, first_label=0, num_read_next=2), cached(torch.float32)
    tokens.pending[OUTPUTS].fill_(5.0)
    own = torch.zeros(len(layout.head_index), 1, requires_grad=True)
    joined = CacheAccess(layout, read=[], consumed=[tokens]).join_outputs(own)
    grad = torch.ones_like(joined)
    (of_own,) = torch.autograd.grad(joined, own, grad)
    assert of_own.sum() == len(own) + 2 * 5.0
    assert (grad == 1).all()
