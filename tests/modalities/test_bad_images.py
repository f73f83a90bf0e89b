"""A batch whose images do not fit its tokens is an error with cause and fix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.batches import make_batch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.modalities.tiny_vision import (
    IMAGE,
    OPEN,
    QUESTION,
    SYSTEM,
    TEXT_ALONE,
    TURNS,
    TWO_GROUPS,
    VIDEO,
    Shown,
    config_of,
    image_batch,
    save_vision_model,
    shot,
)
from tests.support import clone, infer, jagged, make_engine, update
from verl_pg_plugin.engine.batch import read_sequences
from verl_pg_plugin.issue import BatchError
from verl_pg_plugin.modalities import Images


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.fixture(scope="module")
def packed(path: str) -> Any:
    return make_engine(path)


def with_inputs(row: int, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[TensorDict], None]:
    def apply(batch: TensorDict) -> None:
        rows = [dict(getattr(given, "data", given)) for given in batch["multi_modal_inputs"]]
        rows[row] = change(rows[row])
        tu.assign_non_tensor_stack(batch, "multi_modal_inputs", rows)

    return apply


def with_tokens(tokens: dict[int, int]) -> Callable[[TensorDict], None]:
    def apply(batch: TensorDict) -> None:
        for index, token in tokens.items():
            batch["input_ids"].values()[index] = token

    return apply


def without(name: str) -> Callable[[TensorDict], Any]:
    return lambda batch: batch.pop(name)


BAD: dict[str, tuple[Callable[[TensorDict], Any], str]] = {
    "no_images_for_placeholders": (without("multi_modal_inputs"), "sequence 0 has 24 placeholders 90.*0 images need 0"),
    "a_sampled_placeholder": (with_tokens({-2: IMAGE}), r"sequence 5 has 25 placeholders 90.*response sampled it"),
    "a_sampled_placeholder_of_another_kind": (
        with_tokens({-2: VIDEO}),
        "sequence 5 has 1 placeholders 91, its 0 videos",
    ),
    "an_image_in_two_pieces": (with_tokens({10: 5, 28: IMAGE}), "each in one piece"),
    "fewer_pixels_than_the_grid": (
        with_inputs(1, lambda given: {**given, "pixel_values": given["pixel_values"][:-4]}),
        r"sequence 1: pixel_values has 92 patches, image_grid_thw needs 96",
    ),
    "pixels_without_a_grid": (
        with_inputs(0, lambda given: {"pixel_values": given["pixel_values"]}),
        "sequence 0: pixel_values has 96 patches, image_grid_thw needs 0",
    ),
    "an_output_that_the_model_does_not_take": (
        with_inputs(3, lambda given: {**given, "image_bound": torch.zeros(1)}),
        r"sequence 3: the processor returns image_bound, which.*use_prefix_grouper=False",
    ),
    "positions_in_one_plane": (
        lambda batch: batch.set("position_ids", make_batch(TWO_GROUPS)["position_ids"]),
        r"needs position_ids of shape \(4, 216\).*has position_ids of shape \(216,",
    ),
    "no_positions": (without("position_ids"), r"needs position_ids of shape \(4, 216\).*has no position_ids"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_images_are_refused_with_the_cause(packed: Any, path: str, case: str) -> None:
    change, message = BAD[case]
    batch = image_batch(path, TWO_GROUPS)
    change(batch)
    with pytest.raises(BatchError, match=message):
        update(packed, batch)


def test_responses_that_end_inside_an_image_are_refused(packed: Any, path: str) -> None:
    batch = image_batch(path, [shot([SYSTEM, Shown((1, 4, 4), 7, "frames"), QUESTION], [[40], OPEN])])
    with pytest.raises(BatchError, match=r"sequence 0 ends in an image.*max_response_length"):
        infer(packed, batch)


def test_images_that_are_no_tiles_are_refused_with_their_row(tmp_path: Path) -> None:
    batch = image_batch(save_vision_model(tmp_path, "internvl"), TWO_GROUPS)
    with_inputs(1, lambda given: {"pixel_values": given["pixel_values"][..., :12]})(batch)
    message = r"sequence 1: pixel_values has images of shape \(3, 16, 12\), and the model's tiles are \(3, 16, 16\);"
    with pytest.raises(BatchError, match=message):
        read_sequences(batch, Images.of(config_of("internvl")))


def log_probs(engine: Any, batch: TensorDict) -> torch.Tensor:
    return infer(engine, batch)["model_output"]["log_probs"].values()


def test_text_needs_no_inputs_and_positions_of_one_length_are_read(packed: Any, path: str) -> None:
    """Such batches come from text data sets, or from verl's processor without images."""
    batch = image_batch(path, TEXT_ALONE)
    want = log_probs(packed, batch)
    for drop in (["multi_modal_inputs"], ["position_ids"], ["multi_modal_inputs", "position_ids"]):
        assert torch.equal(log_probs(packed, batch.exclude(*drop)), want)
    # With one length, torch makes the dimension of four the ragged axis, as after verl's transfer queue.
    samples = [TURNS[0], TURNS[2]]
    batch = image_batch(path, samples)
    rows, other = batch["position_ids"].unbind(), clone(batch)
    other["position_ids"] = jagged(rows)
    assert other["position_ids"].values().shape == (8, len(samples[0].tokens))
    assert torch.equal(log_probs(packed, other), log_probs(packed, batch))


def one_bit_off(pixels: torch.Tensor) -> torch.Tensor:
    changed = pixels.clone()
    changed[40, 7] = changed[40, 7].nextafter(torch.tensor(9.0))
    return changed


DIFFERENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one bit": one_bit_off,
    "order": lambda pixels: torch.cat([pixels[:96].flip(0), pixels[96:]]),  # the first image's sum stays
    "dtype": lambda pixels: pixels.double(),
}


@pytest.mark.parametrize("name", [*DIFFERENT, "kind", "positions"])
def test_images_with_any_difference_are_not_shared(path: str, name: str) -> None:
    """Positions count too: Qwen2.5-VL's encode the speed of a video."""
    batch, modality = image_batch(path, TURNS[:2]), Images.of(config_of("qwen3_vl"))
    first, second = (len(turn.tokens) - 1 for turn in TURNS[:2])
    assert read_sequences(batch, modality).build_layout().num_tokens == first + 1
    if name == "positions":
        start = batch["position_ids"].offsets()[1]
        batch["position_ids"].values()[1, start + 6 : start + 28] += 1
    elif name == "kind":
        ids, (start, stop) = batch["input_ids"].values(), batch["input_ids"].offsets()[1:].tolist()
        ids[start:stop][ids[start:stop] == IMAGE] = VIDEO
        names = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}
        with_inputs(1, lambda given: {names[n]: given[n] for n in names})(batch)
    else:
        with_inputs(1, lambda given: {**given, "pixel_values": DIFFERENT[name](given["pixel_values"])})(batch)
    assert read_sequences(batch, modality).build_layout().num_tokens == first + second - len(SYSTEM)
