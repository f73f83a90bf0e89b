"""The entry in transformers' attention registry computes or refuses; it never drops an argument."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

from tests.attention.dense import random_tensors
from tests.layout.tries import batch_of
from verl_pg_plugin.attention.context import PackedAttention, UlyssesAttention
from verl_pg_plugin.attention.interface import (
    ATTENTION,
    ATTENTION_NAME,
    attention_options,
    packed_attention,
    register_attention,
)
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.op import AttentionOptions

LAYOUT = batch_of(((1, 2, 3), (4, 5)), ((1, 2, 3), (6,))).layout()
TENSORS = random_tensors(LAYOUT.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=0, dtype=torch.float64)


class Layer(nn.Module):
    layer_idx = 7


def packed() -> PackedAttention:
    return PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"), "cpu")


def call(module: nn.Module | None = None, **kwargs: Any) -> torch.Tensor:
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (TENSORS.q, TENSORS.k, TENSORS.v))
    options = {"attention_mask": None, "prefix_grouper": packed(), **kwargs}
    out, weights = packed_attention(module or Layer(), q, k, v, **options)
    assert weights is None
    return out


def expected(**kwargs: Any) -> torch.Tensor:
    options = {"softmax_scale": 8**-0.5, **kwargs}
    return packed().attend_packed(TENSORS.q, TENSORS.k, TENSORS.v, AttentionOptions(**options)).unsqueeze(0)


def test_outputs_have_the_shape_that_decoders_reshape_next() -> None:
    out = call()
    assert out.shape == (1, LAYOUT.num_tokens, 4, 8)
    assert torch.equal(out, expected())


def test_scaling_and_sliding_window_of_the_model_are_used() -> None:
    assert torch.equal(call(scaling=0.3), expected(softmax_scale=0.3))
    assert torch.equal(call(sliding_window=2), expected(window_size=1))  # transformers counts the query itself
    assert not torch.equal(call(sliding_window=2), call())


def test_keywords_that_mean_nothing_without_a_cache_are_accepted() -> None:
    options = {"use_cache": False, "cache_position": torch.arange(3), "position_ids": torch.arange(3), "sinks": None}
    options |= {"output_attentions": False, "output_router_logits": True}  # decoders of experts hand the latter on
    assert torch.equal(call(dropout=0.0, is_causal=True, **options), expected())


def test_a_model_that_does_not_hand_the_layout_down_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Layer \(layer 7\) runs with attention 'prefix_grouper_packed' but got no"):
        call(prefix_grouper=None)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "attention_mask"),
        ({"dropout": 0.1}, "attention dropout 0.1"),
        ({"is_causal": False}, "bidirectional attention"),
        ({"position_bias": torch.zeros(4), "dropout": 0.5}, "attention dropout 0.5, position_bias"),
    ],
)
def test_what_packed_attention_does_not_compute_is_refused_by_name(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(RuntimeError, match=f"asks for {named}, which packed attention does not compute; set actor"):
        call(**kwargs)


def test_a_bidirectional_module_is_refused_even_if_nobody_says_is_causal() -> None:
    module = Layer()
    module.is_causal = False
    with pytest.raises(RuntimeError, match="bidirectional attention"):
        call(module)


def test_every_call_of_the_registered_function_is_counted_so_a_skipped_layer_is_noticed() -> None:
    register_attention()
    register_attention()
    assert AttentionInterface()[ATTENTION_NAME] is packed_attention
    rows = packed()
    for _ in range(3):
        call(prefix_grouper=rows)
    assert rows.calls == {ATTENTION: 3}


def test_sinks_softcap_and_number_of_the_layer_are_handed_on() -> None:
    """Cached tokens lie in the cache by the number of their layer."""
    sinks = torch.zeros(4)
    options = attention_options(Layer(), torch.zeros(1, 4, 5, 16), None, softcap=30.0, s_aux=sinks)
    assert options.sinks is sinks
    assert replace(options, sinks=None) == AttentionOptions(0.25, softcap=30.0, layer_idx=7)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(6, 6, 4), (12, 3, 2), (12, 2, 3)])
def test_heads_that_cannot_be_spread_are_named(
    heads: int, kv_heads: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedAttention(batch_of(((1, 2), (3,))).layout(), select_kernel("sdpa", "cpu"), "cpu")
    rows = UlyssesAttention(packed, packed.num_tokens, dist.group.WORLD)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    query, key = torch.zeros(1, heads, 2, 4), torch.zeros(1, kv_heads, 2, 4)
    with pytest.raises(ValueError, match=f"{heads} query and {kv_heads} key/value heads .* over {ranks} ranks"):
        rows.attend(query, key, key, AttentionOptions(1.0))
