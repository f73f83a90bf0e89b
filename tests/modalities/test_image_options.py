"""Images stay exact under every option that packed mode has."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.engine.carried_cases import carrying, carrying_engine
from tests.modalities.image_cases import CHAIN, FORKS, MIXED, TURNS, TWO_GROUPS
from tests.modalities.tiny_vision import (
    KINDS,
    expected,
    image_batch,
    load,
    run_alone,
    save_vision_model,
)
from tests.support import actor_loss, assert_same, clone, infer, make_engine, run_engine, save_adapter
from verl_pg_plugin.engine.verify import MismatchError
from verl_pg_plugin.modalities import image_keys

pytestmark = pytest.mark.usefixtures("process_group")

OPTIONS: dict[str, dict[str, Any]] = {
    "micro_batches_of_60_rows": {"batch": {"max_token_len_per_gpu": 60}},
    "micro_batches_of_3_sequences": {"batch": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3}},
    "head_in_chunks": {"engine": {"logits_chunk_size": 4}},
    "fused_head": {"model": {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}},
    "verified": {"engine": {"verify": "every_1"}, "batch": {"max_token_len_per_gpu": 60}},
    "padded_rows": {"engine": {"pad_to_length": True, "pad_to_length_bucket": 16}},
    "attention_recomputed": {"engine": {"activations": "inputs"}},
    "nothing_checkpointed": {"model": {"enable_gradient_checkpointing": False}},
    "compiled_layers": {"engine": {"compile_layers": True}},
    "parameters_offloaded": {"engine": {"param_offload": True, "optimizer_offload": True}},
}


@pytest.fixture(scope="module", params=[KINDS[1], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[::2])])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


COMPILED = pytest.param("compiled_layers", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.mark.parametrize("option", [*(name for name in OPTIONS if name != "compiled_layers"), COMPILED])
def test_every_option_is_exact(path: str, option: str) -> None:
    settings = OPTIONS[option]
    batch = image_batch(load(path), MIXED, **settings.get("batch", {}))
    engine = make_engine(path, packed=True, engine=settings.get("engine"), model=settings.get("model"))
    assert_same(run_engine(engine, batch, actor_loss()), expected(path, MIXED))


def test_an_adapter_on_tower_and_layers_is_exact(path: str, tmp_path: Path) -> None:
    adapter = save_adapter(load(path), tmp_path, rank=2)
    batch = image_batch(load(path), MIXED)
    model = {"lora_rank": 2, "lora_alpha": 4, "target_modules": "all-linear", "lora_adapter_path": adapter}
    got = run_engine(make_engine(path, packed=True, model=model), batch, actor_loss())
    assert any(".visual." in name and gradient.any() for name, gradient in got.gradients.items())
    assert_same(got, run_alone(path, MIXED, clone(batch), actor_loss(), adapter))


@pytest.mark.parametrize(
    ("samples", "budget"),
    [(CHAIN, 62), (TURNS, 52), (FORKS, 60)],
    ids=["a_group", "pictures_in_responses", "forks_behind_a_picture"],
)
def test_images_of_a_chain_are_computed_by_the_part_that_owns_them(
    path: str, samples: list, budget: int, record_property: Any
) -> None:
    record_property("option", "a group larger than the token budget")
    batch = image_batch(load(path), samples, max_token_len_per_gpu=budget)
    engine = carrying_engine(path)
    with carrying(engine):
        got = run_engine(engine, batch, actor_loss())
    assert_same(got, expected(path, samples))


def test_verify_mode_stops_a_run_that_takes_images_for_equal(path: str) -> None:
    engine = make_engine(path, packed=True, engine={"verify": "first"})
    batch = image_batch(load(path), TWO_GROUPS)
    same = patch.object(image_keys, "_content", lambda *args: 0)
    with same, pytest.raises(MismatchError, match=r"sample \d of the 6 in forward-only"):
        infer(engine, batch)
