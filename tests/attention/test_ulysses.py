"""Heads that a Ulysses group cannot spread are refused before any collective."""

import pytest
import torch
import torch.distributed as dist

from tests.layout.tries import batch_of
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.op import AttentionOptions
from verl_pg_plugin.attention.context import UlyssesAttention

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(6, 6, 4), (12, 3, 2), (12, 2, 3)])
def test_heads_that_cannot_be_spread_are_named(
    heads: int, kv_heads: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedAttention(batch_of(((1, 2), (3,))).layout(), select_kernel("sdpa", "cpu"), "cpu")
    rows = UlyssesAttention(packed, packed.num_rows, dist.group.WORLD)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    query, key = torch.zeros(1, heads, 2, 4), torch.zeros(1, kv_heads, 2, 4)
    with pytest.raises(ValueError, match=f"{heads} query and {kv_heads} key/value heads .* over {ranks} ranks"):
        rows.attend(query, key, key, AttentionOptions(1.0))
