"""FSDP2 over two processes: exact however the groups fall on the ranks, and no rank waits for one that failed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import on_ranks
from tests.support import (
    Result,
    actor_loss,
    assert_same,
    clone,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin.engine.batch.micro_batch_plan import plan_micro_batches
from verl_pg_plugin.synthetic import Sample, make_batch

SAMPLES = [*group(14, [5, 3, 8, 2], 1), *group(9, [4, 4], 2), *group(6, [7, 1], 3)]
SPLITS = {
    "groups_whole": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "a_group_cut_across_ranks": [[0, 1, 4, 6], [2, 3, 5, 7]],
    "uneven_work": [[6, 7, 5, 4], [1, 3, 0, 2]],
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))


CUTS = {
    "by_tokens": {"max_token_len_per_gpu": 26},
    "by_sequences": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3},
}


def run_splits(rank: int, path: str) -> dict[tuple[str, str], tuple[Result, int]]:
    """Outputs, gradients and number of micro-batches for every split and cut."""
    engine = make_engine(path, packed=True)
    results = {}
    for split, rows in SPLITS.items():
        for cut, settings in CUTS.items():
            batch = tu.index_select_tensor_dict(make_batch(SAMPLES, **settings), rows[rank])
            plan = plan_micro_batches(clone(batch), engine.get_data_parallel_group(), 1, engine.sharing)
            results[split, cut] = run_engine(engine, batch, actor_loss()), len(plan.micro_batches)
    return results


@pytest.fixture(scope="module")
def ranks(qwen3: str) -> list[dict[tuple[str, str], tuple[Result, int]]]:
    return on_ranks(2, run_splits, qwen3)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_of_two_ranks_equal_the_rows_alone(ranks: list, qwen3: str, split: str, cut: str) -> None:
    reference = run_reference(qwen3, make_batch(SAMPLES), actor_loss())
    for mine, results in zip(SPLITS[split], ranks, strict=True):
        outputs = {name: [values[row] for row in mine] for name, values in reference.outputs.items()}
        assert_same(results[split, cut][0], Result(outputs, reference.gradients))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("cut", CUTS)
def test_every_rank_runs_the_same_number_of_micro_batches(ranks: list, split: str, cut: str) -> None:
    first, second = (results[split, cut][1] for results in ranks)
    assert first == second > 1


def fail_on_rank_one(rank: int, path: str) -> list[str]:
    good, bad = make_batch(SAMPLES), make_batch([*SAMPLES[:-1], Sample([1, 2], [])])
    long = make_batch(SAMPLES, max_token_len_per_gpu=15)
    engine = make_engine(path, packed=True)
    messages = []
    for wrong in (bad, make_batch(SAMPLES).exclude("responses"), long):
        try:
            with engine.train_mode():
                engine.forward_backward_batch(clone(wrong if rank == 1 else good), actor_loss())
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    with engine.train_mode():
        engine.forward_backward_batch(clone(good), actor_loss())
    return messages


def test_a_bad_batch_on_one_rank_stops_both_and_the_next_one_runs(qwen3: str) -> None:
    first, second = on_ranks(2, fail_on_rank_one, qwen3)
    expected = ("row 7 has an empty response", "no responses", "ppo_max_token_len_per_gpu")
    assert len(first) == len(second) == len(expected)
    for told, raised, cause in zip(first, second, expected, strict=True):
        assert cause in raised
        assert told.startswith("rank 1: ")
        assert cause in told


def save_and_resume(rank: int, path: str, folder: str) -> list[dict[str, torch.Tensor]]:
    """One packed step, a checkpoint, and the next step taken by engines of either mode that resume from it."""
    batch = tu.index_select_tensor_dict(make_batch(SAMPLES), SPLITS["uneven_work"][rank])

    def step(engine: Any) -> dict[str, torch.Tensor]:
        with engine.train_mode():
            engine.train_batch(clone(batch), actor_loss())
        return {name: p.full_tensor().detach().clone() for name, p in engine.module.named_parameters()}

    engine = make_engine(path, packed=True)
    step(engine)
    engine.save_checkpoint(folder, global_step=1)
    weights = [step(engine)]
    for packed in (True, False):
        resumed = make_engine(path, packed=packed)
        resumed.load_checkpoint(folder)
        weights.append(step(resumed))
    return weights


def test_checkpoint_resumes_bit_equal_and_with_the_mode_toggled(qwen3: str, tmp_path: Path) -> None:
    uninterrupted, packed, off = on_ranks(2, save_and_resume, qwen3, str(tmp_path / "checkpoint"))[0]
    for name, weight in uninterrupted.items():
        assert torch.equal(packed[name], weight), name
        torch.testing.assert_close(off[name], weight, rtol=1e-4, atol=1e-5, msg=name)
