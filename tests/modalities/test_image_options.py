"""Images stay exact under every option that packed mode has."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import transformers

from tests.modalities.tiny_vision import KINDS, MIXED, TWO_GROUPS, image_batch, save_vision_model
from tests.support import check_exact, infer, make_engine, save_adapter
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
    "parameters_offloaded": {"engine": {"param_offload": True, "optimizer_offload": True}},
    "compiled_layers": {"engine": {"compile_layers": True}},
}
COMPILED = pytest.param("compiled_layers", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.fixture(scope="module", params=[KINDS[1], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[::2])])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("option", [*(name for name in OPTIONS if name != "compiled_layers"), COMPILED])
def test_every_option_is_exact(path: str, option: str) -> None:
    settings = {**OPTIONS[option]}
    batch = image_batch(path, MIXED, **settings.pop("batch", {}))
    check_exact(make_engine(path, **settings), path, batch)


def test_an_adapter_on_encoder_and_layers_is_exact(path: str, tmp_path: Path) -> None:
    stock = transformers.AutoModelForImageTextToText.from_pretrained(path)
    adapter = save_adapter(stock, tmp_path, rank=2)
    model = {"lora_rank": 2, "lora_alpha": 4, "target_modules": "all-linear", "lora_adapter_path": adapter}
    got = check_exact(make_engine(path, model=model), path, image_batch(path, MIXED), adapter=adapter)
    assert any(".visual." in name and gradient.any() for name, gradient in got.gradients.items())


def test_verify_mode_stops_a_run_that_takes_images_for_equal(path: str) -> None:
    same = patch.object(image_keys, "_content", lambda *args: 0)
    with same, pytest.raises(MismatchError, match=r"sample \d of the 6 in forward-only"):
        infer(make_engine(path, engine={"verify": "first"}), image_batch(path, TWO_GROUPS))
