"""Rows with images are shared, and give the numbers of every row alone."""

from typing import Any

import pytest

from tests.engine.carried_cases import carrying, carrying_engine
from tests.modalities.image_cases import CHAIN, FORKS, MIXED, TEXT_ALONE, TURNS, TWO_GROUPS, film
from tests.modalities.tiny_vision import (
    HYBRID_KINDS,
    KINDS,
    assert_exact,
    expected,
    image_batch,
    load,
    save_vision_model,
    without_encoder,
)
from tests.support import actor_loss, assert_same, infer, make_engine, run_engine

pytestmark = pytest.mark.usefixtures("process_group")


LONG = [pytest.param(kind, marks=pytest.mark.slow) for kind in (KINDS[2], HYBRID_KINDS[1])]


@pytest.fixture(scope="module", params=[*KINDS[:2], KINDS[3], HYBRID_KINDS[0], *LONG])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def packed(path: str, process_group: None) -> Any:
    return make_engine(path, packed=True)


@pytest.mark.parametrize("case", ["mixed", "turns", "film", "forks"])
def test_every_token_and_gradient_equals_the_row_alone(packed: Any, path: str, kind: str, case: str) -> None:
    cases = {"mixed": MIXED, "turns": TURNS, "forks": FORKS, "film": film(kind)}
    got = run_engine(packed, image_batch(load(path), cases[case]), actor_loss())
    assert_exact(got, expected(path, cases[case]), kind)


def test_a_group_that_is_split_behind_its_images_equals_the_rows_alone(path: str, kind: str) -> None:
    """Of hybrids the states behind the images are read too."""
    engine = carrying_engine(path)
    with carrying(engine):
        got = run_engine(engine, image_batch(load(path), CHAIN, max_token_len_per_gpu=60), actor_loss())
    assert_exact(got, expected(path, CHAIN), kind)


def test_text_alone_trains_without_the_vision_encoder(packed: Any, path: str) -> None:
    batch, stock = image_batch(load(path), TEXT_ALONE), load(path)
    got = run_engine(packed, batch, actor_loss())
    assert_same(got, without_encoder(expected(path, TEXT_ALONE)), tolerance=2e-5)
    assert set(packed.module.state_dict()) == set(stock.state_dict())
    # verl's forward, which it puts into the classes for good, would drop which tokens are shared.
    assert type(stock).forward.__module__ == type(stock).__module__
    with packed.train_mode():
        packed.forward_backward_batch(batch, actor_loss())
        assert packed.optimizer_step() > 0  # weights of the vision encoder have no gradient


def test_each_image_goes_through_the_encoder_once(packed: Any, path: str) -> None:
    """Six samples of two images, 24 tokens each; every sample has tokens of its own behind its image."""
    patches: list[int] = []
    encoder = next(part for name, part in packed.module.named_modules() if name.endswith("visual"))
    hook = encoder.register_forward_pre_hook(lambda _, args, kwargs: patches.append(len(args[0])), with_kwargs=True)
    metrics = infer(packed, image_batch(load(path), TWO_GROUPS))["metrics"]
    hook.remove()
    assert patches == metrics["prefix_grouper/patches"] == [96 * 2]
    assert metrics["prefix_grouper/logical_patches"] == [96 * 6]
