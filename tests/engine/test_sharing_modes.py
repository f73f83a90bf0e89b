"""How many padding rows a micro-batch gets, and who gets none."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.support import PACKED_MODE, group
from verl_pg_plugin.attention.cache import CacheAccess
from verl_pg_plugin.engine.batch.sequences import BatchError
from verl_pg_plugin.layout.carried import idle_export
from verl_pg_plugin.synthetic import make_batch

BATCH = make_batch(group(9, [4, 3], 1), max_token_len_per_gpu=20)  # 8 + 4 + 3 rows
LAYOUT = PACKED_MODE.lay_out(PACKED_MODE.read(BATCH))


def test_rows_are_padded_to_the_next_multiple() -> None:
    assert LAYOUT.num_rows == 15
    for multiple, padding in ((1, 0), (5, 0), (8, 1), (16, 1)):
        assert replace(PACKED_MODE, row_multiple=multiple).num_padding_rows(LAYOUT, BATCH) == padding


def test_static_rows_fill_the_budget_of_all_ranks_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    static = replace(PACKED_MODE, static_rows=True)
    assert static.num_padding_rows(LAYOUT, BATCH) == 20 - 15
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    shared = replace(static, sp_group=object())  # type: ignore[arg-type]
    assert shared.num_padding_rows(LAYOUT, BATCH) == 3 * 20 - 15


def test_rows_that_just_fill_the_budget_fit_and_one_more_does_not() -> None:
    static = replace(PACKED_MODE, static_rows=True)
    assert static.num_padding_rows(LAYOUT, make_batch(group(9, [4, 3], 1), max_token_len_per_gpu=15)) == 0
    with pytest.raises(BatchError, match="15 rows do not fit max_token_len_per_gpu=14"):
        static.num_padding_rows(LAYOUT, make_batch(group(9, [4, 3], 1), max_token_len_per_gpu=14))


def test_an_export_is_not_padded_to_the_budget() -> None:
    """It would cost as much as a micro-batch."""
    sequences = PACKED_MODE.read(BATCH)
    export = idle_export(sequences.tokens, sequences.offsets)
    static = replace(PACKED_MODE, static_rows=True)
    rows = static.to_device(export, BATCH, CacheAccess(export, read=[], is_export=True))
    assert rows.input_ids.shape == (1, 1)
