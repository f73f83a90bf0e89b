"""Images on GPUs in bf16: as close to float32 as stock verl or single sequences, encoder and projector included.

verl patches the classes of such models for the whole process, so the stock engines run last.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import on_ranks
from tests.modalities.tiny_vision import KINDS, WITHOUT_VIDEOS, Shot, Shown, image_batch, load, save_vision_model, shots
from tests.precision import BF16, FLASH, SMOOTH_LOSS, assert_no_worse, error_of, errors, pooled
from tests.support import Result, actor_loss, clone, make_engine, run_engine, run_reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200), pytest.mark.usefixtures("process_group")]
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}
SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "initializer_range": 0.05}
QWEN3 = {"rope_parameters": {**ROPE, "mrope_interleaved": True}}
OF_KIND = {
    "qwen3_vl": QWEN3,
    "glm4v_moe": {"rope_parameters": {**ROPE, "mrope_section": [8, 4, 4]}, "num_experts_per_tok": 4},
    "internvl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    # Tokens visit all experts: otherwise rounding that changes their choice would dominate the error.
    "qwen3_vl_moe": {**QWEN3, "moe_intermediate_size": 128, "num_experts_per_tok": 4},
}
TOWER = {"hidden_size": 128, "intermediate_size": 256}  # heads of 64, which every build of flash-attn has
LOSS = actor_loss(**SMOOTH_LOSS)
LENGTHS = (60, 33, 90, 5, 71, 64, 20, 48)
GRIDS = (1, 16, 24), (1, 8, 8), (1, 16, 24)
GRIDS_OF_VIDEOS = (2, 8, 12), (2, 8, 8), (3, 8, 12)


def shown_groups(draw: int, kind: str = "image") -> list[Shot]:
    """Return eight responses to two images or videos, four to another one, and one to text."""
    grids = GRIDS if kind == "image" else GRIDS_OF_VIDEOS

    def words(count: int, seed: int) -> list[int]:
        return np.random.default_rng([draw, seed]).integers(1, 60, count).tolist()

    cat, chart, dog = (Shown(grid, 3 * draw + i, kind) for i, grid in enumerate(grids))
    return [
        *shots([words(60, 1), cat, words(40, 2), chart, words(9, 3)], *(words(n, n) for n in LENGTHS)),
        *shots([words(60, 1), dog, words(20, 4)], *(words(n, 100 + n) for n in LENGTHS[:4])),
        *shots([words(50, 5)], words(64, 200)),
    ]


def by_sequence(batch: TensorDict) -> TensorDict:
    batch = clone(batch)
    tu.assign_non_tensor(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    return batch


def error_of_all(engine: Any, batches: list[TensorDict], references: list[Result]) -> dict[str, float]:
    """Pool all batches: a single one is up to 1.2 times stock verl's error, or less, by chance."""
    return pooled([error_of(engine, *pair, LOSS) for pair in zip(batches, references, strict=True)])


def test_bf16_error_is_at_most_that_of_stock_rmpad_or_of_single_sequences(tmp_path: Path) -> None:
    results = {}
    for kind in (*KINDS, *WITHOUT_VIDEOS):
        sizes = {**SIZES, "rope_parameters": ROPE, **OF_KIND.get(kind, {})}
        path = save_vision_model(tmp_path / kind, kind, encoder=TOWER, **sizes)
        batches = [image_batch(path, shown_groups(draw), max_token_len_per_gpu=1200) for draw in range(8)]
        drawn = batches, [run_reference(path, batch, LOSS) for batch in batches]
        packed = [make_engine(path, engine={**BF16, "compile_layers": on}, model=FLASH) for on in (False, True)]
        results[kind, path] = drawn, [error_of_all(engine, *drawn) for engine in packed]
    for (kind, path), (drawn, uncompiled_and_compiled) in results.items():
        if kind in WITHOUT_VIDEOS:  # stock verl does not run their images
            alone = make_engine(path, engine={**BF16, "prefix_cache": "off"}, model=FLASH)
            baseline = error_of_all(alone, list(map(by_sequence, drawn[0])), drawn[1])
        else:
            stock = make_engine(path, packed=False, engine=BF16, model=FLASH)
            baseline = error_of_all(stock, *drawn)
        for ours in uncompiled_and_compiled:
            assert_no_worse(ours, baseline)


def joint_batches(path: str) -> list[TensorDict]:
    """Return batches whose first half has images and whose second half has videos; a text ends each half."""
    videos = "video" if load(path).config.model_type == "qwen2_5_vl" else "frames"
    samples = [[*shown_groups(draw), *shown_groups(draw, videos)] for draw in range(8)]
    return [image_batch(path, of_draw, max_token_len_per_gpu=1200) for of_draw in samples]


def run_on_rank(rank: int, path: str, packed: bool, *sequences: range) -> list[Result]:
    """Return, on the CPU, the results of the batches with this rank's sequences."""
    engine, results = make_engine(path, packed=packed, engine=BF16, model=FLASH), []
    for batch in joint_batches(path):
        result = run_engine(engine, tu.index_select_tensor_dict(batch, list(sequences[rank])), LOSS)
        outputs = {name: [row.cpu() for row in rows] for name, rows in result.outputs.items()}
        results.append(Result(outputs, {name: gradient.cpu() for name, gradient in result.gradients.items()}))
    return results


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("kind", KINDS[:2])
def test_images_on_one_gpu_and_videos_on_another_are_as_close_to_float32_as_stock_rmpad(
    kind: str, tmp_path: Path
) -> None:
    """Stock rmpad runs all sequences on one GPU."""
    sizes = {**SIZES, "rope_parameters": ROPE, **OF_KIND.get(kind, {})}
    path = save_vision_model(tmp_path, kind, encoder=TOWER, **sizes)
    references = [run_reference(path, batch, LOSS) for batch in joint_batches(path)]
    of_images, of_videos = on_ranks(2, run_on_rank, path, True, range(13), range(13, 26), device="cuda")
    (stock,) = on_ranks(1, run_on_rank, path, False, range(26), device="cuda")
    packed = []
    for images, videos in zip(of_images, of_videos, strict=True):
        outputs = {name: [*rows, *videos.outputs[name]] for name, rows in images.outputs.items()}
        packed.append(Result(outputs, images.gradients))
    baseline, ours = (pooled(list(map(errors, results, references))) for results in (stock, packed))
    assert_no_worse(ours, baseline)
