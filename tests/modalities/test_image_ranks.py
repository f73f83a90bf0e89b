"""Images over two processes: a rank without any, rows of an image on both ranks, and a bad batch on one of them."""

from pathlib import Path
from typing import Any

import pytest
from verl.utils import tensordict_utils as tu

from tests.engine.carried_cases import carry_always, carrying
from tests.engine.ranks import on_ranks
from tests.modalities.image_cases import CHAIN, MIXED, TEXT_ALONE, TWO_GROUPS
from tests.modalities.tiny_vision import (
    HYBRID_KINDS,
    IMAGE,
    KINDS,
    assert_exact,
    expected,
    image_batch,
    load,
    save_vision_model,
    without_encoder,
)
from tests.support import Result, actor_loss, assert_same, clone, make_engine, run_engine

SPLIT = [*TWO_GROUPS, *TEXT_ALONE, *TEXT_ALONE, *TEXT_ALONE]
"""Six rows with images for rank 0, six without for rank 1."""


def own_rows(rank: int) -> list[int]:
    return list(range(6 * rank, 6 * rank + 6))


def fail_on_rank_one(engine: Any, rank: int, path: str) -> str:
    good = image_batch(load(path), TWO_GROUPS)
    bad = clone(good)
    bad["input_ids"].values()[-2] = IMAGE
    with engine.train_mode():
        with pytest.raises((ValueError, RuntimeError)) as raised:
            engine.forward_backward_batch(bad if rank == 1 else clone(good), actor_loss())
        engine.forward_backward_batch(good, actor_loss())
    return str(raised.value)


def run_split(rank: int, path: str) -> tuple[dict[str, Result], str]:
    """By number of tokens of a micro-batch: rank 1 has text alone. Then what is said to a batch that is bad there."""
    engine = make_engine(path, packed=True)
    results = {}
    for name, budget in {"one micro-batch": 1 << 20, "several": 50}.items():
        batch = image_batch(load(path), SPLIT, max_token_len_per_gpu=budget)
        mine = tu.index_select_tensor_dict(batch, own_rows(rank))
        results[name] = run_engine(engine, mine, actor_loss())
    return results, fail_on_rank_one(engine, rank, path)


def run_spread(rank: int, path: str, carries: bool = True) -> dict[str, Result]:
    """Ulysses: the rows of each micro-batch are spread over both ranks."""
    engine = make_engine(path, packed=True, engine={"ulysses_sequence_parallel_size": 2})
    samples = {"images": MIXED, "text": TEXT_ALONE} if carries else {"images": MIXED}
    results = {name: run_engine(engine, image_batch(load(path), some)) for name, some in samples.items()}
    if carries:
        carry_always(engine)
        with carrying(engine):
            results["chain"] = run_engine(engine, image_batch(load(path), CHAIN, max_token_len_per_gpu=31))
    return results


@pytest.fixture(scope="module", params=[KINDS[1], pytest.param(KINDS[0], marks=pytest.mark.slow)])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def ranks(path: str) -> list[tuple[dict[str, Result], str]]:
    return on_ranks(2, run_split, path)


def test_a_rank_without_images_waits_for_nobody(ranks: list, path: str) -> None:
    for rank, (results, _) in enumerate(ranks):
        for result in results.values():
            assert_same(result, expected(path, SPLIT).of_rank(own_rows(rank)))


def test_rows_of_images_are_spread_over_ranks(path: str) -> None:
    for results in on_ranks(2, run_spread, path):
        assert_same(results["images"], expected(path, MIXED))
        assert_same(results["text"], without_encoder(expected(path, TEXT_ALONE)))
        assert_same(results["chain"], expected(path, CHAIN))


def test_images_of_hybrids_are_spread_over_ranks(tmp_path: Path) -> None:
    path = save_vision_model(tmp_path, HYBRID_KINDS[0])
    for got in on_ranks(2, run_spread, path, False):
        assert_exact(got["images"], expected(path, MIXED), HYBRID_KINDS[0])


def test_a_bad_image_on_one_rank_stops_both_and_the_next_batch_runs(ranks: list) -> None:
    (_, told), (_, raised) = ranks
    assert "sequence 5 has 25 placeholders 90, its 1 images need 24" in raised
    assert told.startswith("rank 1: BatchError: ")
    assert raised in told
