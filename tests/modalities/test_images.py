"""Rows with images are shared, and give the numbers of every row alone."""

from dataclasses import replace
from typing import Any

import pytest

from tests.mixers.hybrids import NEARLY_CANCEL
from tests.modalities.image_cases import FORKS, MIXED, TEXT_ALONE, TURNS, TWO_GROUPS, film
from tests.modalities.tiny_vision import HYBRID_KINDS, KINDS, expected, image_batch, load, save_vision_model
from tests.support import Result, actor_loss, assert_same, make_engine, run_engine

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
    # Where sums nearly cancel, stock itself is as far from float64; tests/mixers hold these layers against that.
    assert got.gradients.keys() == want.gradients.keys()
    for nearly_cancel, tolerance in ((False, 2e-5), (True, 1e-4)):
        names = [name for name in want.gradients if name.endswith(NEARLY_CANCEL) == nearly_cancel]
        part, part_wanted = (Result(r.outputs, {n: r.gradients[n] for n in names}, r.loss) for r in (got, want))
        assert_same(part, part_wanted, tolerance)


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
