"""With on_mismatch=rmpad, a run that verify mode catches goes on, with the numbers of rows alone."""

import logging
import math

import pytest
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import on_ranks
from tests.engine.steps.broken_layouts import wrong_kv_row
from tests.engine.steps.verifying import NUM_LOGICAL, SAMPLES, break_layouts, infer, update
from tests.support import Result, actor_loss, assert_same, clone, make_engine, run_engine, run_reference
from verl_pg_plugin.engine.batch.micro_batch_plan import plan_micro_batches
from verl_pg_plugin.engine.steps.verify import MismatchError
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")


def test_rmpad_on_mismatch_goes_on_with_the_right_numbers(qwen3: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first", "on_mismatch": "rmpad", "verify_rows": 7})
    break_layouts(engine, wrong_kv_row)
    batch = make_batch(SAMPLES, max_token_len_per_gpu=120)
    with caplog.at_level(logging.WARNING):
        assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))
    assert caplog.text.count("From here on nothing is shared (prefix_grouper.on_mismatch=rmpad)") == 1
    unshared = plan_micro_batches(clone(batch), None, 1, engine.sharing, math.inf)
    assert max(layout.num_tokens for layout in unshared.layouts) <= 120
    for step in (infer, update, update):
        metrics = step(engine, batch)
        assert metrics["prefix_grouper/verify_fallback"] == [1.0]
        assert metrics["prefix_grouper/rmpad_micro_batches"] == [len(unshared.layouts)], "cut anew, within the budget"
        assert metrics["prefix_grouper/physical_tokens"] == [NUM_LOGICAL - len(SAMPLES)]


def test_an_update_that_falls_back_midway_counts_what_it_ran(qwen3: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first", "on_mismatch": "rmpad", "verify_rows": 7})
    break_layouts(engine, wrong_kv_row)
    metrics = update(engine, make_batch(SAMPLES, max_token_len_per_gpu=120))
    assert metrics["prefix_grouper/verify_fallback"] == [1.0]
    assert metrics["prefix_grouper/rmpad_micro_batches"] == [2.0]
    assert metrics["prefix_grouper/physical_tokens"] == [NUM_LOGICAL - len(SAMPLES)]


def test_gradients_of_an_update_that_falls_back_are_right(qwen3: str) -> None:
    batch = make_batch(SAMPLES, max_token_len_per_gpu=120)
    engine = make_engine(qwen3, packed=True, engine={"verify": "first", "on_mismatch": "rmpad", "verify_rows": 7})
    engine.verifier.verified["forward-only"] = True  # the old log-probs were verified before the fault
    expected = run_reference(qwen3, batch, actor_loss())
    found = run_engine(break_layouts(engine, wrong_kv_row), batch, actor_loss())
    assert_same(Result({}, found.gradients), Result({}, expected.gradients))
    assert engine.verifier.fallen_back


SPLITS = [[0, 1, 4, 6], [2, 3, 5]]


def mismatch_on_rank_one(rank: int, path: str) -> tuple[str, Result, list[dict[str, list[float]]]]:
    """The error where rank 1 has a fault, then the results of falling back, and metrics of both."""
    batch = tu.index_select_tensor_dict(make_batch(SAMPLES, max_token_len_per_gpu=120), SPLITS[rank])
    message = ""
    for on_mismatch in ("raise", "rmpad"):
        engine = make_engine(
            path, packed=True, engine={"verify": "first", "on_mismatch": on_mismatch, "verify_rows": 4}
        )
        before = infer(engine, batch)
        engine.verifier.verified.clear()
        if rank == 1:
            break_layouts(engine, wrong_kv_row)
        if on_mismatch == "raise":
            with pytest.raises(MismatchError) as caught:
                update(engine, batch)
            message = str(caught.value)
        else:
            return message, run_engine(engine, batch, actor_loss()), [before, update(engine, batch)]
    raise AssertionError


def test_a_mismatch_on_one_rank_stops_both_or_takes_both_back(qwen3: str) -> None:
    ranks = on_ranks(2, mismatch_on_rank_one, qwen3)
    reference = run_reference(qwen3, make_batch(SAMPLES), actor_loss())
    for mine, (message, result, (before, after)) in zip(SPLITS, ranks, strict=True):
        assert message.startswith("rank 1: sample")
        outputs = {name: [values[row] for row in mine] for name, values in reference.outputs.items()}
        assert_same(result, Result({name: outputs[name] for name in result.outputs}, reference.gradients))
        assert before["prefix_grouper/verified_rows"] == [4.0]
        assert after["prefix_grouper/verify_fallback"] == [1.0]
    assert ranks[0][2][0]["prefix_grouper/verify_max_error"] == ranks[1][2][0]["prefix_grouper/verify_max_error"]
