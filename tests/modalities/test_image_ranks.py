"""Images over two processes: a rank without any, rows of an image on both ranks, and a bad batch on one of them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import check_exact_on_ranks, on_ranks
from tests.modalities.tiny_vision import (
    CHAIN,
    HYBRID_KINDS,
    IMAGE,
    KINDS,
    MIXED,
    TEXT_ALONE,
    TWO_GROUPS,
    image_batch,
    save_vision_model,
)
from tests.support import Result, actor_loss, assert_same, clone, make_engine, run_engine, run_reference

SPLIT = [*TWO_GROUPS, *TEXT_ALONE, *TEXT_ALONE, *TEXT_ALONE]
"""Six rows with images for rank 0, six without for rank 1."""


def own_rows(rank: int) -> list[int]:
    return list(range(6 * rank, 6 * rank + 6))


def fail_on_rank_one(engine: Any, rank: int, path: str) -> str:
    good = image_batch(path, TWO_GROUPS)
    bad = clone(good)
    bad["input_ids"].values()[-2] = IMAGE
    with engine.train_mode():
        with pytest.raises((ValueError, RuntimeError)) as raised:
            engine.forward_backward_batch(bad if rank == 1 else clone(good), actor_loss())
        engine.forward_backward_batch(good, actor_loss())
    return str(raised.value)


def run_split(rank: int, path: str) -> tuple[list[Result], str]:
    """In one micro-batch and in several: rank 1 has text alone. Then what is said to a batch that is bad there."""
    engine = make_engine(path)
    batches = [image_batch(path, SPLIT, max_token_len_per_gpu=budget) for budget in (1 << 20, 50)]
    results = [run_engine(engine, tu.index_select_tensor_dict(batch, own_rows(rank))) for batch in batches]
    return results, fail_on_rank_one(engine, rank, path)


@pytest.fixture(scope="module", params=[KINDS[1], pytest.param(KINDS[0], marks=pytest.mark.slow)])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def ranks(path: str) -> list[tuple[list[Result], str]]:
    return on_ranks(2, run_split, path)


def test_a_rank_without_images_waits_for_nobody(ranks: list, path: str) -> None:
    expected = run_reference(path, image_batch(path, SPLIT))
    for rank, (results, _) in enumerate(ranks):
        for result in results:
            assert_same(result, expected.of_rank(own_rows(rank)))


def test_a_bad_image_on_one_rank_stops_both_and_the_next_batch_runs(ranks: list) -> None:
    (_, told), (_, raised) = ranks
    assert "sequence 5 has 25 placeholders 90, its 1 images need 24" in raised
    assert told.startswith("rank 1: BatchError: ")
    assert raised in told


@pytest.mark.parametrize("kind", [KINDS[1], HYBRID_KINDS[0], pytest.param(KINDS[0], marks=pytest.mark.slow)])
def test_rows_of_images_are_spread_over_ranks(kind: str, tmp_path: Path) -> None:
    path, spread = save_vision_model(tmp_path, kind), {"ulysses_sequence_parallel_size": 2}
    for samples, budget in ((MIXED, 1 << 20), (TEXT_ALONE, 1 << 20), (CHAIN, 31)):
        make = partial(image_batch, path, samples, max_token_len_per_gpu=budget)
        check_exact_on_ranks(path, make, float64=kind in HYBRID_KINDS, splits=samples is CHAIN, engine=spread)
