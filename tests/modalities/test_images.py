"""Rows with images are shared, and give the numbers of every row alone."""

from dataclasses import replace
from typing import Any

import pytest

from tests.modalities.image_cases import FORKS, MIXED, TEXT_ALONE, TURNS, TWO_GROUPS, film
from tests.modalities.tiny_vision import (
    HYBRID_KINDS,
    KINDS,
    assert_hybrid_same,
    expected,
    image_batch,
    load,
    save_vision_model,
)
from tests.support import actor_loss, assert_same, make_engine, run_engine

pytestmark = pytest.mark.usefixtures("process_group")


LONG = [pytest.param(kind, marks=pytest.mark.slow) for kind in (KINDS[2], HYBRID_KINDS[1])]


@pytest.fixture(scope="module", params=[*KINDS[:2], HYBRID_KINDS[0], *LONG])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def packed(path: str, process_group: None) -> Any:
    return make_engine(path, packed=True)


@pytest.mark.parametrize("case", ["mixed", "turns", "film", "forks", "text"])
def test_every_token_and_gradient_equals_the_row_alone(packed: Any, path: str, kind: str, case: str) -> None:
    cases = {"mixed": MIXED, "turns": TURNS, "forks": FORKS, "text": TEXT_ALONE}
    samples = film(kind) if case == "film" else cases[case]
    want = expected(path, samples)
    if case == "text":  # no rank has an image, so the vision encoder stays out
        want = replace(want, gradients={name: g for name, g in want.gradients.items() if ".visual." not in name})
    got = run_engine(packed, image_batch(load(path), samples), actor_loss())
    if kind not in HYBRID_KINDS:
        return assert_same(got, want)
    assert_hybrid_same(got, want)


def test_each_image_goes_through_the_encoder_once(packed: Any, path: str) -> None:
    """Six samples of two images, 24 tokens each; every sample has tokens of its own behind its image."""
    patches: list[int] = []
    encoder = next(part for name, part in packed.module.named_modules() if name.endswith("visual"))
    hook = encoder.register_forward_pre_hook(lambda _, args, kwargs: patches.append(len(args[0])), with_kwargs=True)
    with packed.eval_mode():
        metrics = packed.infer_batch(image_batch(load(path), TWO_GROUPS))["metrics"]
    hook.remove()
    assert patches == metrics["prefix_grouper/patches"] == [96 * 2]
    assert metrics["prefix_grouper/logical_patches"] == [96 * 6]
