"""Rows with images are shared, and give the numbers of every row alone."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.modalities.tiny_vision import (
    CHAIN,
    FORKS,
    HYBRID_KINDS,
    KINDS,
    MIXED,
    TEXT_ALONE,
    TURNS,
    TWO_GROUPS,
    film,
    image_batch,
    load,
    save_vision_model,
)
from tests.precision import in_float64
from tests.support import actor_loss, check_exact, infer, make_engine

pytestmark = pytest.mark.usefixtures("process_group")


LONG = [pytest.param(kind, marks=pytest.mark.slow) for kind in (KINDS[2], HYBRID_KINDS[1])]
WHOLE = 1 << 30
CASES: dict[str, tuple[list, int]] = {
    "mixed": (MIXED, WHOLE),
    "turns": (TURNS, WHOLE),
    "forks": (FORKS, WHOLE),
    "films": ([], WHOLE),
    "split groups": (CHAIN, 60),
    "images in split responses": (TURNS, 52),
    "forks behind an image in split groups": (FORKS, 60),
}
"""Samples, films apart, which differ by kind; and the token budget of a micro-batch."""


@pytest.fixture(scope="module", params=[*KINDS[:2], KINDS[3], HYBRID_KINDS[0], *LONG])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_float64() if request.param in HYBRID_KINDS else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def packed(path: str, process_group: None) -> Any:
    return make_engine(path, splits=True)


@pytest.mark.parametrize("case", CASES)
def test_every_token_and_gradient_equals_the_row_alone(packed: Any, path: str, kind: str, case: str) -> None:
    """Of split groups of hybrids the states behind the images are read too."""
    samples, budget = CASES[case]
    batch = image_batch(path, samples or film(kind), max_token_len_per_gpu=budget)
    check_exact(packed, path, batch, splits=budget < WHOLE)


def test_text_alone_trains_without_the_vision_encoder(packed: Any, path: str) -> None:
    batch, stock = image_batch(path, TEXT_ALONE), load(path)
    check_exact(packed, path, batch)
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
    metrics = infer(packed, image_batch(path, TWO_GROUPS))["metrics"]
    hook.remove()
    assert patches == metrics["prefix_grouper/patches"] == [96 * 2]
    assert metrics["prefix_grouper/logical_patches"] == [96 * 6]
