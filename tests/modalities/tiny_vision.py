"""Tiny vision-language models, and samples with images in the form that verl passes to an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.batches import Sample, make_batch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.mixers import hybrids
from tests.support import TINY

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_vl")
HYBRID_KINDS = ("qwen3_5", "qwen3_5_moe")  # with Gated DeltaNet layers
WITHOUT_VIDEOS = ("glm4v", "internvl", "glm4v_moe")
IMAGE, VIDEO, START, END = 90, 91, 92, 93
VOCAB, PATCH, MERGE, FRAMES = 96, 4, 2, 2
MEDIA = {"image": ("pixel_values", "image_grid_thw", IMAGE), "video": ("pixel_values_videos", "video_grid_thw", VIDEO)}

TEXT = {**TINY, "vocab_size": VOCAB, "num_hidden_layers": 3, "initializer_range": 0.15, "pad_token_id": 0}
ENCODER = {
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "initializer_range": 0.15,
    "num_heads": 2,
    "depth": 2,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 24,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
QWEN35_ENCODER = {**ENCODER, "num_position_embeddings": 64}
QWEN3_ENCODER = {**QWEN35_ENCODER, "deepstack_visual_indexes": [0, 1]}
QWEN3_TEXT = {**TEXT, "head_dim": 8, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
GLM_EXPERTS = {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
ZERO = ("visual.pos_embed.weight", "position_embeddings", "cls_token")
"""Parameters that transformers initialises with zeros."""
GLM_ENCODER = {**ENCODER, "image_size": 16}
TILE = (3, 4 * PATCH, 4 * PATCH)
TILE_ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE[1:],
    "patch_size": (PATCH, PATCH),
    "initializer_range": 0.15,
}


def config_of(kind: str, encoder: dict[str, Any] | None = None, **text: Any) -> Any:
    encoder = {"out_hidden_size": text.get("hidden_size", TEXT["hidden_size"]), **(encoder or {})}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        rope = {**ROPE, "mrope_section": [1, 1, 2]}
        sizes = {**ENCODER, **encoder, "window_size": 16, "fullatt_block_indexes": [1]}
        if kind == "qwen2_vl":  # whose name for the encoder's width is embed_dim
            unknown = ("intermediate_size", "window_size", "fullatt_block_indexes")
            width = {"embed_dim": sizes["hidden_size"], "hidden_size": sizes.pop("out_hidden_size"), "mlp_ratio": 2}
            sizes = {name: size for name, size in sizes.items() if name not in unknown} | width
        parts = {"text_config": {**TEXT, "rope_parameters": rope, **text}, "vision_config": sizes}
    elif kind in HYBRID_KINDS:
        sizes = {**hybrids.SIZES, **hybrids.KINDS[f"{kind}_text"], "vocab_size": VOCAB, **text}
        rope = {**QWEN3_TEXT["rope_parameters"], "partial_rotary_factor": 1.0}
        parts = {"text_config": {**sizes, "rope_parameters": rope}, "vision_config": QWEN35_ENCODER}
    elif kind in WITHOUT_VIDEOS:
        rope = {**ROPE, "mrope_section": [1, 1] if kind == "glm4v_moe" else [1, 1, 2]}  # MoE: of half a head
        own = {"model_type": "qwen3"} if kind == "internvl" else {"rope_parameters": rope}
        own |= GLM_EXPERTS if kind == "glm4v_moe" else {}
        sizes = TILE_ENCODER if kind == "internvl" else {**GLM_ENCODER, **encoder}
        parts = {"text_config": {**TEXT, **own, **text}, "vision_config": sizes}
    else:
        experts = EXPERTS if kind == "qwen3_vl_moe" else {}
        parts = {"text_config": {**QWEN3_TEXT, **experts, **text}, "vision_config": {**QWEN3_ENCODER, **encoder}}
    return transformers.AutoConfig.for_model(kind, **parts, **ids, tie_word_embeddings=False)


def save_vision_model(path: Path, kind: str, encoder: dict[str, Any] | None = None, **text: Any) -> str:
    """Write a random float32 checkpoint; ``text`` and ``encoder`` override sizes of its two parts."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config_of(kind, encoder, **text), dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith(ZERO):
            torch.nn.init.normal_(weight, std=0.15)
    hybrids.remember(model).save_pretrained(path)
    return str(path)


@dataclass(frozen=True)
class Shown:
    """An image or video; equal seeds are equal pixels. All processors close it with a token."""

    grid: tuple[int, int, int]  # frames, rows and columns of patches
    seed: int
    kind: str = "image"  # or "video", or "frames", each after a timestamp as Qwen3-VL's processor writes them
    closed: bool = True  # if False, responses diverge right after the placeholders

    @property
    def medium(self) -> str:
        return "image" if self.kind == "image" else "video"

    @property
    def tokens(self) -> list[int]:
        token = MEDIA[self.medium][2]
        frames, height, width = self.grid
        count = height * width // MERGE**2
        if self.kind == "frames":
            return [t for frame in range(frames) for t in (60 + frame, START, *[token] * count, END)]
        return [START, *[token] * (frames * count), *[END] * self.closed]

    @property
    def pixels(self) -> torch.Tensor:
        numbers = 3 * FRAMES * PATCH**2
        return torch.randn(int(np.prod(self.grid)), numbers, generator=torch.Generator().manual_seed(self.seed))


Part = Shown | Sequence[int]


@dataclass(frozen=True)
class Shot(Sample):
    """One sequence, and what a processor returns of the images and videos in it."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.response]


def shot(prompt: Sequence[Part], response: Sequence[Part]) -> Shot:
    inputs: dict[str, list[torch.Tensor]] = {}
    for shown in (part for part in (*prompt, *response) if isinstance(part, Shown)):
        pixels, grids, _ = MEDIA[shown.medium]
        inputs.setdefault(pixels, []).append(shown.pixels)
        inputs.setdefault(grids, []).append(torch.tensor([shown.grid]))
    tokens = (
        [t for part in of for t in (part.tokens if isinstance(part, Shown) else part)] for of in (prompt, response)
    )
    return Shot(*tokens, inputs={name: torch.cat(tensors) for name, tensors in inputs.items()})


def shots(prompt: Sequence[Part], *responses: Sequence[int]) -> list[Shot]:
    """A group: one prompt, responses of tokens alone."""
    return [shot(prompt, [response]) for response in responses]


@cache
def load(path: str) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)


def position_ids(model: Any, sample: Shot) -> torch.Tensor:
    """Return (4, L) as verl's agent loop makes them: a counter, then the model's own rope index."""
    ids = torch.tensor([sample.tokens])
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    grids = {name: tensor for name, tensor in sample.inputs.items() if name.endswith("thw")}
    rope, _ = model.model.get_rope_index(ids, mm_token_type_ids=types, attention_mask=torch.ones_like(ids), **grids)
    return torch.cat([torch.arange(ids.shape[1])[None], rope[:, 0]])


def image_batch(path: str, samples: Sequence[Shot], **settings: Any) -> TensorDict:
    """Return the samples as verl's V1 trainer passes them to an engine, with its agent loop's image inputs."""
    batch, model = make_batch(samples, **settings), load(path)
    rows = [{name: tensor.clone() for name, tensor in sample.inputs.items()} for sample in samples]
    if model.config.model_type == "internvl":
        numbers = TILE[0] * PATCH**2  # of a patch, without a second frame
        rows = [{n: x[:, :numbers].reshape(-1, *TILE) for n, x in row.items() if n == "pixel_values"} for row in rows]
    else:
        positions = [position_ids(model, sample) for sample in samples]
        batch["position_ids"] = tu.nested_tensor_from_tensor_list(positions, ragged_idx=2)
    for row in rows:
        if (grids := row.get("image_grid_thw")) is not None:
            row["images_seqlens"] = grids[:, 1] * grids[:, 2]
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", rows)
    return batch


SYSTEM, QUESTION = [10, 11, 12], [20, 21, 22, 23]
CAT, DOG = Shown((1, 8, 12), 1), Shown((1, 8, 12), 2)  # of one size: their tokens are equal
WIDE, CHART, OTHER_CHART = Shown((1, 4, 8), 3), Shown((1, 4, 8), 5), Shown((1, 4, 8), 6)

TWO_GROUPS = [
    *shots([SYSTEM, CAT, QUESTION], [40, 41, 42, 43], [40, 44], [45, 46, 47, 48, 49]),
    *shots([SYSTEM, DOG, QUESTION], [40, 41, 42], [40, 44, 50], [51]),
]
TEXT_ALONE = shots([SYSTEM, QUESTION], [40, 41, 42], [55, 56])
MIXED = [*TWO_GROUPS, *shots([SYSTEM, WIDE, [30, 31], CAT, QUESTION], [40, 41], [52, 53, 54]), *TEXT_ALONE]
TURNS = [
    shot([SYSTEM, CAT, QUESTION], [[40, 41], CHART, [42, 43]]),
    shot([SYSTEM, CAT, QUESTION], [[40, 41], CHART, [44]]),
    shot([SYSTEM, CAT, QUESTION], [[40, 41], OTHER_CHART, [42, 43]]),
    shot([SYSTEM, CAT, QUESTION], [[45]]),
]


def film(kind: str) -> list[Shot]:
    """Samples with an image and a two-frame video, whose last frame differs in one, in the processor's format."""
    clip = Shown((2, 4, 4), 7, "video" if kind in ("qwen2_vl", "qwen2_5_vl") else "frames")
    other_end = shot([SYSTEM, WIDE, clip, QUESTION], [[40, 41]])
    other_end.inputs["pixel_values_videos"][-1] += 1
    shorter = shot([SYSTEM, WIDE, Shown((1, 4, 4), 7, clip.kind), QUESTION], [[40, 41]])
    return [*shots([SYSTEM, WIDE, clip, QUESTION], [40, 41], [42, 43, 44], [40, 45]), other_end, shorter]


OPEN = Shown((1, 4, 8), 3, closed=False)
FORKS = [*shots([SYSTEM, CAT, QUESTION, OPEN], *([i, 41 + i, 30] for i in range(30, 38))), *TEXT_ALONE]
"""The first token after an image differs, so the row of its last placeholder does."""

CHAIN = [
    *shots([SYSTEM, CAT, QUESTION, WIDE, [24]], *([40 + i, 50 - i, 41 + i, 60 + i, 30] for i in range(8))),
    *TEXT_ALONE,
]
