"""What rollouts hand over: filtered groups, groups of any size, and rows of one prompt in different batches."""

import pytest
from verl.utils import tensordict_utils as tu

from tests.options.harness import Checkpoint, Engines
from tests.options.table import BUDGET, DEFAULT, SAMPLES
from tests.support import Result, actor_loss, assert_same, clone, run_engine, run_reference
from verl_pg_plugin.synthetic import make_batch


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 6], [4, 5, 7], [0, 1, 4, 6]], ids=str)
def test_groups_that_are_left_after_filtering(engines: Engines, checkpoint: Checkpoint, rows: list[int]) -> None:
    batch = make_batch([SAMPLES[row] for row in rows], max_token_len_per_gpu=BUDGET)
    assert_same(
        run_engine(engines.of(DEFAULT), batch, actor_loss()), run_reference(checkpoint.model, batch, actor_loss())
    )


def test_rows_of_one_prompt_in_different_batches(engines: Engines, checkpoint: Checkpoint) -> None:
    """Every batch is exact, and the gradients of their sums add up to that of all rows."""
    everything = make_batch(SAMPLES, max_token_len_per_gpu=BUDGET)
    loss = actor_loss(loss_agg_mode="token-sum")
    expected = run_reference(checkpoint.model, everything, loss)
    total = {name: gradient * 0 for name, gradient in expected.gradients.items()}
    for rows in ([0, 2, 4, 7], [1, 5], [3, 6]):
        result = run_engine(engines.of(DEFAULT), tu.index_select_tensor_dict(everything, rows), loss)
        outputs = {name: [values[row] for row in rows] for name, values in expected.outputs.items()}
        assert_same(Result(result.outputs, {}), Result(outputs, {}))
        total = {name: gradient + result.gradients[name] for name, gradient in total.items()}
    assert_same(Result({}, total), Result({}, expected.gradients))


def test_the_dedup_ratio_of_what_arrived_is_reported(engines: Engines) -> None:
    batch = make_batch(SAMPLES[:2])
    with engines.of(DEFAULT).train_mode():
        metrics = engines.of(DEFAULT).forward_backward_batch(clone(batch), actor_loss())["metrics"]
    prompt, (first, second) = 20, (5, 9)
    logical, physical = 2 * prompt + first + second, prompt - 1 + first + second
    assert metrics["prefix_grouper/dedup_ratio"] == [logical / physical]
