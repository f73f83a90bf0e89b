"""Sequences with images are shared and match every sequence alone, on two ranks and under every option."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import transformers

from tests.engine.ranks import check_exact_on_ranks
from tests.modalities.tiny_vision import (
    CHAIN,
    FORKS,
    HYBRID_KINDS,
    KINDS,
    MIXED,
    TEXT_ALONE,
    TURNS,
    TWO_GROUPS,
    WITHOUT_VIDEOS,
    film,
    image_batch,
    load,
    save_vision_model,
)
from tests.precision import in_float64
from tests.support import FUSED_HEAD, actor_loss, check_exact, infer, make_engine, save_adapter
from verl_pg_plugin.engine.verify import MismatchError
from verl_pg_plugin.modalities import images

LONG = [pytest.param(kind, marks=pytest.mark.slow) for kind in (KINDS[2], HYBRID_KINDS[1], WITHOUT_VIDEOS[2])]
WHOLE = 1 << 30
CASES: dict[str, tuple[list, int]] = {  # samples (films differ by kind), token budget of a micro-batch
    "mixed": (MIXED, WHOLE),
    "turns": (TURNS, WHOLE),
    "forks": (FORKS, WHOLE),
    "films": ([], WHOLE),
    "split groups": (CHAIN, 60),
    "images in split responses": (TURNS, 52),
    "forks after an image in split groups": (FORKS, 60),
}
QUICK: dict[str, tuple[str, ...]] = {  # the slow tests run all pairs
    KINDS[0]: ("mixed", "films", "forks after an image in split groups"),
    KINDS[1]: tuple(CASES),
    KINDS[3]: ("mixed", "films", "split groups"),
    HYBRID_KINDS[0]: ("films", "images in split responses", "forks after an image in split groups"),
    WITHOUT_VIDEOS[0]: ("mixed", "images in split responses"),
    WITHOUT_VIDEOS[1]: ("mixed", "images in split responses", "forks after an image in split groups"),
}
ALL = [
    pytest.param(kind, case, marks=[] if case in QUICK.get(kind, ()) else [pytest.mark.slow])
    for kind in (*KINDS, *HYBRID_KINDS, *WITHOUT_VIDEOS)
    for case in CASES
    if case != "films" or kind not in WITHOUT_VIDEOS
]


@pytest.fixture(scope="module", params=[*KINDS[:2], KINDS[3], HYBRID_KINDS[0], *WITHOUT_VIDEOS[:2], *LONG])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_float64() if request.param in HYBRID_KINDS else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def packed(path: str) -> Any:
    return make_engine(path, splits=True)


@pytest.mark.parametrize(("kind", "case"), ALL, indirect=["kind"])
def test_images_match_single_sequences(packed: Any, path: str, kind: str, case: str) -> None:
    samples, budget = CASES[case]
    batch = image_batch(path, samples or film(kind), max_token_len_per_gpu=budget)
    check_exact(packed, path, batch, splits=budget < WHOLE)


def test_text_trains_without_the_encoder_and_each_image_is_encoded_once(packed: Any, path: str) -> None:
    batch, stock = image_batch(path, TEXT_ALONE), load(path)
    check_exact(packed, path, batch)
    assert set(packed.module.state_dict()) == set(stock.state_dict())
    # verl patches its forward into the class, and it would drop which tokens are shared.
    assert type(stock).forward.__module__ == type(stock).__module__
    with packed.train_mode():
        packed.forward_backward_batch(batch, actor_loss())
        assert packed.optimizer_step() > 0  # weights of the vision encoder have no gradient
    # Six samples of two images; every sample has its own tokens after its image.
    patches: list[int] = []
    encoder = next(part for name, part in packed.module.named_modules() if name.endswith(("visual", "vision_tower")))

    def count(_: Any, args: tuple, kwargs: dict) -> None:
        patches.append((*args, *kwargs.values())[0].numel() // packed.modality.patch_numbers)

    hook = encoder.register_forward_pre_hook(count, with_kwargs=True)
    metrics = infer(packed, image_batch(path, TWO_GROUPS))["metrics"]
    hook.remove()
    assert patches == metrics["prefix_grouper/patches"] == [96 * 2]
    assert metrics["prefix_grouper/total_patches"] == [96 * 6]


OPTIONS: dict[str, dict[str, Any]] = {
    "fused_head": {"model": FUSED_HEAD, "batch": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3}},
    "verified": {"engine": {"verify": "every_1"}, "batch": {"max_token_len_per_gpu": 60}},
    "padded_rows": {"engine": {"pad_to_length": True, "pad_to_length_bucket": 16}},
    "nothing_checkpointed": {"model": {"enable_gradient_checkpointing": False}},
    "what_knows_no_images": {
        "engine": {"logits_chunk_size": 4, "activations": "inputs", "param_offload": True, "optimizer_offload": True}
    },
    "compiled_layers": {"engine": {"compile_layers": True}},
    "compiled_layers_of_fsdp1": {"engine": {"compile_layers": True}, "strategy": "fsdp"},
}
COMPILED = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]) for name in list(OPTIONS)[-2:]]
WITH_OPTIONS = pytest.mark.parametrize(
    "kind",
    [KINDS[1], *(pytest.param(kind, marks=pytest.mark.slow) for kind in (*KINDS[::2], *WITHOUT_VIDEOS[:2]))],
    indirect=True,
)


@WITH_OPTIONS
@pytest.mark.parametrize("option", [*list(OPTIONS)[:-2], *COMPILED])
def test_every_option_is_exact(path: str, option: str) -> None:
    settings = {**OPTIONS[option]}
    batch = image_batch(path, MIXED, **settings.pop("batch", {}))
    check_exact(make_engine(path, **settings), path, batch)


@WITH_OPTIONS
def test_adapters_on_encoder_and_layers_are_exact(kind: str, path: str, tmp_path: Path) -> None:
    adapter = save_adapter(transformers.AutoModelForImageTextToText.from_pretrained(path), tmp_path, rank=2)
    model = {"lora_rank": 2, "lora_alpha": 4, "target_modules": "all-linear", "lora_adapter_path": adapter}
    got = check_exact(make_engine(path, model=model), path, image_batch(path, MIXED), adapter=adapter)
    encoder = ".vision_tower." if kind == "internvl" else ".visual."
    assert any(encoder in name and gradient.any() for name, gradient in got.gradients.items())


@WITH_OPTIONS
def test_verify_mode_detects_different_images_taken_for_equal(path: str) -> None:
    same = patch.object(images, "_content_id", lambda *args: 0)
    with same, pytest.raises(MismatchError, match=r"sample \d of the 6 in forward-only"):
        infer(make_engine(path, engine={"verify": "first"}), image_batch(path, TWO_GROUPS))


ALSO_SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in (KINDS[0], *WITHOUT_VIDEOS[:2])]


@pytest.mark.parametrize("kind", [KINDS[1], *ALSO_SLOW], indirect=True)
def test_ranks_without_images_or_videos_do_not_deadlock(kind: str, path: str) -> None:
    """Six sequences on each rank; tests/engine/test_two_ranks.py has bad batches."""
    text, (*films, _) = 3 * TEXT_ALONE, [*film(kind), *TEXT_ALONE]
    for others, budget in ((text, 1 << 20), (text, 50), *([] if kind in WITHOUT_VIDEOS else [(films, 1 << 20)])):
        make = partial(image_batch, path, [*TWO_GROUPS, *others], max_token_len_per_gpu=budget)
        check_exact_on_ranks(path, make, [list(range(6)), list(range(6, 12))])


@pytest.mark.parametrize("kind", [KINDS[1], HYBRID_KINDS[0], *ALSO_SLOW], indirect=True)
def test_images_are_exact_with_tokens_spread_over_ranks(kind: str, path: str) -> None:
    spread = {"ulysses_sequence_parallel_size": 2}
    for samples, budget in ((MIXED, 1 << 20), (TEXT_ALONE, 1 << 20), (CHAIN, 31)):
        make = partial(image_batch, path, samples, max_token_len_per_gpu=budget)
        check_exact_on_ranks(path, make, float64=kind in HYBRID_KINDS, splits=samples is CHAIN, engine=spread)
