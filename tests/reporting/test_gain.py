"""The gain that a run tells at its end is what its steps add up to."""

from __future__ import annotations

import pytest

from verl_pg_plugin.reporting.gain import Gain

STEP = {
    "actor/prefix_grouper/logical_tokens": 1000.0,
    "actor/prefix_grouper/physical_tokens": 250.0,
    "actor/prefix_grouper/dedup_ratio": 4.0,
    "actor/prefix_grouper/dedup_ratio_of_groups": 4.0,
    "actor/prefix_grouper/flop_ratio": 3.0,
    "perf/total_num_tokens": 2000,
    "timing_s/gen": 50.0,
    "timing_s/old_log_prob": 1.0,
    "timing_s/update_actor": 4.0,
    "timing_s/step": 60.0,
}


def test_rows_flops_and_seconds_add_up_over_steps() -> None:
    """The metrics are means over mini-batches; the tokens of a step are all of them."""
    other = {
        **STEP,
        "perf/total_num_tokens": 6000,
        "actor/prefix_grouper/flop_ratio": 2.0,
        "timing_s/old_log_prob": 5.0,
    }
    gain = Gain().with_step(STEP).with_step(other)
    assert (gain.num_steps, gain.tokens, gain.rows) == (2, 8000, 2000)
    assert gain.dedup_ratio == 4.0
    assert gain.flop_ratio == pytest.approx((2000 * 3 + 6000 * 2) / 8000)
    assert gain.seconds == {"old_log_prob": 6.0, "update_actor": 8.0}
    assert gain.saved_seconds == {"old_log_prob": 1.0 * 2 + 5.0 * 1, "update_actor": 4.0 * 2 + 4.0 * 1}


def test_the_words_name_rows_flops_and_the_seconds_of_each_phase() -> None:
    rows, flops, seconds = Gain().with_step(STEP).lines()
    assert rows.startswith("shared prefixes: 1,500 of 2,000 rows never computed (75%), in each of old_log_prob, update")
    assert flops == "FLOPs: 3.00 times fewer than with every sequence alone"
    assert "10.0 s saved beside 5.0 s taken (old_log_prob 2.0 s, update_actor 8.0 s)" in seconds


def test_more_than_n_tokens_to_a_row_is_explained_by_a_common_preamble() -> None:
    lines = Gain().with_step({**STEP, "actor/prefix_grouper/dedup_ratio_of_groups": 2.5}).lines()
    assert lines[1].startswith(
        "  2.50 of that is what the responses to one prompt share; the rest is that prompts begin"
    )


@pytest.mark.parametrize("metrics", [{}, {"timing_s/update_actor": 3.0, "perf/total_num_tokens": 100}])
def test_a_run_that_shares_nothing_tells_no_gain(metrics: dict[str, float]) -> None:
    gain = Gain().with_step(metrics)
    assert gain == Gain()
    assert gain.lines() == []
