"""A user learns why a group that fits by its rows is cut: what attention would copy of it is said once."""

import logging
from pathlib import Path

import pytest

from tests.support import actor_loss, clone, group, make_engine, run_engine, save_tiny_model
from verl_pg_plugin.batching.copied_keys import CopiedKeys
from verl_pg_plugin.engine.batch.micro_batch_plan import plan_micro_batches
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

ROWS_OF_A_GROUP = 19 + 8 * 2
"""Rows of a prompt of 20 and 8 responses of 2 tokens."""


@pytest.mark.parametrize("carry", ["auto", "never"])
def test_the_engine_says_once_that_copied_keys_cut_a_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, carry: str
) -> None:
    engine = make_engine(save_tiny_model(tmp_path), packed=True, engine={"carry": carry})
    batch = make_batch(group(20, [2] * 8, 1), max_token_len_per_gpu=2 * ROWS_OF_A_GROUP)

    def said(copies: CopiedKeys) -> list[str]:
        monkeypatch.setattr(engine, "_copied_keys", lambda forward_only: copies)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run_engine(engine, clone(batch), actor_loss())
        return [record.getMessage() for record in caplog.records if "keys per row" in record.getMessage()]

    assert said(CopiedKeys(weight=1.0, free=10.0)) == [], "they are free"
    (message,) = said(CopiedKeys(weight=1.0, free=2.0))
    (whole,) = plan_micro_batches(clone(batch), None, 1, engine.sharing).layouts
    keys_per_row = whole.num_copied_keys / whole.num_rows
    assert keys_per_row > 5
    assert f"attention would copy {keys_per_row:.0f} keys per row of a group" in message
    assert "micro-batches are made where rows alone need 1, and 0 compute attention again where 0 would" in message
    assert ("carried parts" in message) == (carry == "auto")
    assert said(CopiedKeys(weight=1.0, free=2.0)) == [], "once per engine"
