"""The entry in transformers' attention registry computes or refuses; it never drops an argument."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.attention.dense import random_tensors
from tests.layout.tries import batch_of
from verl_pg_plugin.attention import interface
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.op import AttentionOptions

LAYOUT = batch_of(((1, 2, 3), (4, 5)), ((1, 2, 3), (6,))).layout()
TENSORS = random_tensors(LAYOUT.num_tokens, heads=4, kv_heads=2, head_dim=8, seed=0, dtype=torch.float64)


class Layer(nn.Module):
    layer_idx = 7


class Bidirectional(Layer):
    is_causal = False


def packed() -> PackedAttention:
    return PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"))


def call(module: nn.Module | None = None, **kwargs: Any) -> torch.Tensor:
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (TENSORS.q, TENSORS.k, TENSORS.v))
    options = {"attention_mask": None, "prefix_grouper": packed(), **kwargs}
    out, weights = interface.packed_attention(module or Layer(), q, k, v, **options)
    assert weights is None
    return out


NO_EFFECT = {"use_cache": False, "cache_position": torch.arange(3), "position_ids": torch.arange(3), "sinks": None}
# Decoders with experts pass the last on.
NO_EFFECT |= {"dropout": 0.0, "is_causal": True, "output_attentions": False, "output_router_logits": True}
SINKS = torch.zeros(4)


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        ({}, {}),
        ({"scaling": 0.3}, {"softmax_scale": 0.3}),
        ({"sliding_window": 2}, {"window_size": 1}),  # transformers counts the query itself
        ({"softcap": 30.0, "s_aux": SINKS}, {"softcap": 30.0, "sinks": SINKS}),
        (NO_EFFECT, {}),
    ],
    ids=["none", "scaling", "window", "softcap and sinks", "no effect"],
)
def test_keywords_and_layer_index_are_used(keywords, options) -> None:
    expected, context = AttentionOptions(**{"softmax_scale": 8**-0.5, "layer_idx": 7, **options}), packed()
    with patch.object(context, "attend", wraps=context.attend) as attend:
        out = call(**keywords, prefix_grouper=context)
    assert attend.call_args.args[-1] == expected
    assert out.shape == (1, LAYOUT.num_tokens, 4, 8)
    assert torch.equal(out, packed().attend_packed(TENSORS.q, TENSORS.k, TENSORS.v, expected).unsqueeze(0))
    with torch.autocast("cpu", torch.bfloat16):  # norms keep queries and keys in float32
        assert packed().attend_packed(*(x.float() for x in TENSORS[:3]), expected).dtype == torch.bfloat16


NO_LAYOUT = r"Layer \(layer 7\) runs with attention 'prefix_grouper_packed' but got no layout"


@pytest.mark.parametrize(
    ("module", "kwargs", "message"),
    [
        (Layer(), {"prefix_grouper": None}, NO_LAYOUT),
        (Layer(), {"attention_mask": torch.ones(1, 1, 5, 5)}, "needs attention_mask, which packed attention"),
        (Layer(), {"is_causal": False}, "needs bidirectional attention, "),
        (Bidirectional(), {}, "needs bidirectional attention, "),
        (Layer(), {"position_bias": torch.zeros(4), "dropout": 0.5}, "needs attention dropout 0.5, position_bias, "),
    ],
)
def test_unsupported_attention_is_refused_by_name(module, kwargs, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(module, **kwargs)


@pytest.mark.usefixtures("process_group")
def test_heads_that_cannot_be_spread_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"), group=dist.group.WORLD)
    for heads, kv_heads, ranks in (6, 2, 4), (12, 3, 2), (12, 2, 3):
        monkeypatch.setattr(dist, "get_world_size", lambda group=None, ranks=ranks: ranks)
        query, key = torch.zeros(1, heads, 2, 4), torch.zeros(1, kv_heads, 2, 4)
        with pytest.raises(ValueError, match=f"{heads} query and {kv_heads} key/value heads .* over {ranks} ranks"):
            rows.attend(query, key, key, AttentionOptions(1.0))
