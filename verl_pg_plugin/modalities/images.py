"""Images and videos: each distinct image goes through its vision encoder once per micro-batch.

All images have the same placeholder token id, so token ids cannot show whether two images are equal. Each token
therefore gets a key; an image's tokens get a key of its content. Equal keys mean equal pixels, bit for bit. verl runs
its processor for every response, so contents are compared, not objects. Keys include the position step from the
previous token, so equal prefixes of keys have equal positions.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from transformers import PretrainedConfig

from verl_pg_plugin.issue import SHARING_OFF, BatchError
from verl_pg_plugin.layout import IntArray, Layout, PackedLayout, Sequences, counted
from verl_pg_plugin.modalities.modality import Kind, Modality, check_counted, read_positions

IMAGES_ALONE = ("glm4v", "glm4v_moe")
"""Types whose placeholders of images and videos are one token, so transformers cannot tell them apart in a batch."""
MROPE_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", *IMAGES_ALONE)
IMAGE_MODEL_TYPES = (*MROPE_MODEL_TYPES, "internvl")
"""Models that are causal over image tokens too, and whose vision encoder processes each image or frame separately."""

POSITION_DIMENSIONS = 4
"""verl's position_ids: token index, time, height, width."""

FIRST_KEY = 1 << 31
"""Keys below are token ids, which are int32."""


@dataclass(frozen=True, eq=False)
class Image:
    """An image or a video frame in a sequence."""

    kind: Kind
    first: int  # index of its first placeholder in the sequence
    num_tokens: int  # consecutive placeholders
    pixels: torch.Tensor  # (patches, elements of a patch), a view
    grid: tuple[int, int]  # rows and columns of patches


@dataclass(frozen=True, kw_only=True)
class Images(Modality):
    """Images and videos, whose placeholders the model replaces by its vision encoder's output."""

    merge_size: int  # a token is merge_size x merge_size patches
    patch_numbers: int  # elements of a patch
    blank: tuple[int, int]  # rows and columns of patches of the smallest image
    tile: tuple[int, ...] = ()  # shape of the pixels of a tile, where these are the images and positions count tokens

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Images":
        vision: Any = config.vision_config
        if config.model_type == "internvl":
            rows, columns = (size // patch for size, patch in zip(vision.image_size, vision.patch_size, strict=True))
            tile = (vision.num_channels, *vision.image_size)
            return cls(
                kinds=(Kind("image", "pixel_values", "image_grid_thw", config.image_token_id),),
                merge_size=round(1 / config.downsample_ratio),
                patch_numbers=math.prod(tile) // (rows * columns),
                blank=(rows, columns),
                tile=tile,
            )
        channels = getattr(vision, "in_channels", None) or vision.in_chans
        kinds = (
            Kind("image", "pixel_values", "image_grid_thw", config.image_token_id),
            Kind("video", "pixel_values_videos", "video_grid_thw", config.video_token_id),
        )
        return cls(
            kinds=kinds[:1] if config.model_type in IMAGES_ALONE else kinds,
            merge_size=vision.spatial_merge_size,
            patch_numbers=channels * vision.temporal_patch_size * vision.patch_size**2,
            blank=(vision.spatial_merge_size,) * 2,
        )

    def install(self, module: Any) -> None:
        """Slice tokens for Ulysses after the vision encoder and the embedding, which every rank runs on all tokens."""
        if (embeddings := getattr(getattr(module.model, "visual", None), "embeddings", None)) is not None:
            # GLM's encoder interpolates the weight of an ``nn.Embedding`` that it never calls, and verl makes each such
            # module an FSDP2 unit, whose weight is gathered in its own forward only.
            embeddings.position_embedding = nn.ParameterDict({"weight": embeddings.position_embedding.weight})
        module.model.language_model.register_forward_pre_hook(_take_own_tokens, with_kwargs=True)

    def read(self, data: TensorDict, sequences: Sequences) -> Sequences:
        outputs, given, offsets = self.read_outputs(data), read_positions(data), sequences.offsets
        if self.tile:
            check_counted(given, offsets)
            outputs = [self._tiles(sequence, output) for sequence, output in enumerate(outputs)]
        images = self._find_images(sequences, outputs)
        positions = counted(offsets)[None] if self.tile else _mrope_positions(given, offsets, has_images=any(images))
        keys, offset_in_image = _build_keys(sequences, positions, images)
        taken = None if self.tile else positions
        return replace(sequences, keys=keys, positions=taken, offset_in_image=offset_in_image, images=images)

    def _tiles(self, sequence: int, output: dict[str, Any]) -> dict[str, Any]:
        """Return a sequence's pixels as (patches, elements), in their order in memory, and (tiles, 3) grids.

        BatchError for images of another size.
        """
        (kind,) = self.kinds
        if (pixels := output.get(kind.pixels)) is None:
            return {}
        if pixels.shape[1:] != self.tile:
            shapes = f"has images of shape {tuple(pixels.shape[1:])}, and the model's tiles are {self.tile}"
            raise BatchError(f"sequence {sequence}: {kind.pixels} {shapes}; {SHARING_OFF}")
        patches = pixels.reshape(-1, self.patch_numbers)
        return {kind.pixels: patches, kind.grids: torch.tensor([(1, *self.blank)] * len(pixels))}

    def _find_images(self, sequences: Sequences, outputs: list[dict[str, Any]]) -> list[list[Image]]:
        """Return the images of each sequence in token order; ``outputs`` as ``read_outputs`` returns them."""
        placeholders = {kind: np.flatnonzero(sequences.tokens == kind.token_id) for kind in self.kinds}
        all_images: list[list[Image]] = []
        for sequence, (start, stop) in enumerate(pairwise(sequences.offsets.tolist())):
            images: list[Image] = []
            for kind, index in placeholders.items():
                own = index[slice(*np.searchsorted(index, [start, stop]))] - start
                images += _images_of(sequence, outputs[sequence] if outputs else {}, kind, own, self.merge_size**2)
            images.sort(key=lambda image: image.first)
            if images and images[-1].first + images[-1].num_tokens == stop - start:
                raise BatchError(
                    f"sequence {sequence} ends in an image, so its last token has no label; drop it, or raise "
                    "data.max_response_length so that tool results are not cut off"
                )
            all_images.append(images)
        return all_images

    def inputs(
        self, layout: PackedLayout, sequences: Sequences, shown: frozenset[Kind]
    ) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Return placeholders to pad with and the layout's images by keyword, once each, in token order.

        FSDP gathers the vision encoder's weights on all ranks or on none. So a kind that only other ranks have gets
        one blank image, whose placeholder is padding and whose gradients are zero.

        Args:
            layout: of ``sequences``, or of a prefix of the first.
            shown: kinds that some rank has in the mini-batch.
        """
        images = shown_images(layout, sequences)
        padding: list[int] = []
        tensors: dict[str, torch.Tensor] = {}
        for kind in self.kinds:
            if of_kind := [image for image in images if image.kind is kind]:
                tensors[kind.pixels] = torch.cat([image.pixels for image in of_kind])
                tensors[kind.grids] = torch.tensor([(1, *image.grid) for image in of_kind])
            elif kind in shown:
                patches = math.prod(self.blank)
                padding += [kind.token_id] * (patches // self.merge_size**2)
                tensors[kind.pixels] = torch.zeros(patches, self.patch_numbers)
                tensors[kind.grids] = torch.tensor([(1, *self.blank)])
            if self.tile and tensors:
                del tensors[kind.grids]
                tensors[kind.pixels] = tensors[kind.pixels].view(-1, *self.tile)
        return padding, tensors


def _mrope_positions(given: IntArray | None, offsets: IntArray, has_images: bool) -> IntArray:
    """Return (4, N) positions; a batch without images may have (N,) positions or none."""
    if given is not None and given.shape == (POSITION_DIMENSIONS, offsets[-1]):
        return given
    if has_images or (given is not None and given.shape != (offsets[-1],)):
        shape = "no position_ids" if given is None else f"position_ids of shape {given.shape}"
        raise BatchError(
            f"a batch with images needs position_ids of shape ({POSITION_DIMENSIONS}, {offsets[-1]}), as from verl's "
            f"agent loop, and has {shape}; {SHARING_OFF}"
        )
    return np.broadcast_to(counted(offsets) if given is None else given, (POSITION_DIMENSIONS, offsets[-1]))


def _images_of(
    sequence: int, output: Mapping[str, Any], kind: Kind, placeholders: IntArray, patches_per_token: int
) -> Iterator[Image]:
    """Yield the images of one kind in a sequence, given the indices of its placeholders."""
    grids, pixels = output.get(kind.grids), output.get(kind.pixels)
    sizes: list[list[int]] = [] if grids is None else grids.tolist()
    frames = [(height, width) for num_frames, height, width in sizes for _ in range(num_frames)]
    needed = sum(height * width for height, width in frames)
    pixels = () if pixels is None else pixels
    if len(pixels) != needed:
        raise BatchError(f"sequence {sequence}: {kind.pixels} has {len(pixels)} patches, {kind.grids} needs {needed}")
    patch = token = 0
    for height, width in frames:
        num_tokens = height * width // patches_per_token
        own = placeholders[token : token + num_tokens]
        if len(own) < num_tokens or own[-1] - own[0] != num_tokens - 1:
            break
        stop = patch + height * width
        yield Image(kind, int(own[0]), num_tokens, pixels[patch:stop], grid=(height, width))
        patch, token = stop, token + num_tokens
    if token != len(placeholders) or patch != needed:
        raise BatchError(
            f"sequence {sequence} has {len(placeholders)} placeholders {kind.token_id}, its {len(sizes)} "
            f"{kind.name}s need {needed // patches_per_token}, each in one piece. Fix: ban the placeholder in the "
            "rollout if a response sampled it; raise data.max_response_length if a tool result was cut off; set "
            "data.filter_overlong_prompts=True if the prompt was"
        )


def _build_keys(
    sequences: Sequences, positions: IntArray, images: Sequence[Sequence[Image]]
) -> tuple[IntArray, IntArray]:
    """Return ``Sequences.keys`` and ``Sequences.offset_in_image``, (N,) each, given (P, N) positions."""
    tokens, starts = sequences.tokens, sequences.offsets[:-1]
    keys, offset_in_image = tokens.astype(np.int64), np.zeros(len(tokens), dtype=np.int64)
    before = np.roll(positions, 1, axis=1)
    before[:, starts] = -1
    steps = positions - before
    unusual = (steps != 1).any(axis=0)
    key_of: dict[Hashable, int] = {}
    known: dict[Hashable, list[torch.Tensor]] = {}
    for start, own in zip(starts, images, strict=True):
        for image in own:
            span = slice(start + image.first, start + image.first + image.num_tokens)
            content = (_content_id(known, image), steps[:, span].tobytes())
            keys[span] = FIRST_KEY + key_of.setdefault(content, len(key_of))
            offset_in_image[span] = np.arange(image.num_tokens)
            unusual[span] = False
    for at in np.flatnonzero(unusual).tolist():  # usually the first token after an image
        keys[at] = FIRST_KEY + key_of.setdefault((int(tokens[at]), steps[:, at].tobytes(), "token"), len(key_of))
    return keys, offset_in_image


def _content_id(known: dict[Hashable, list[torch.Tensor]], image: Image) -> Hashable:
    """Return an id that is equal for equal kind, grid, dtype and pixels.

    A sum selects the candidates, whose pixels are then compared. Both take all threads: a batch of 32 images of 1,024
    tokens has 0.8 GB of pixels.
    """
    words = image.pixels.contiguous().cpu().view(torch.int64)  # every patch has a multiple of 8 bytes
    summary = (image.kind.name, image.grid, image.pixels.dtype, image.pixels.shape, int(words.sum()))
    candidates = known.setdefault(summary, [])
    number = next((i for i, other in enumerate(candidates) if torch.equal(other, words)), len(candidates))
    if number == len(candidates):
        candidates.append(words)
    return summary, number


def shown_images(layout: Layout, sequences: Sequences) -> list[Image]:
    """Return the images whose tokens are in the layout, in token order."""
    assert isinstance(layout, PackedLayout)
    starts = zip(sequences.offsets.tolist(), sequences.images, strict=False)
    by_first = {start + image.first: image for start, images in starts for image in images}
    return [by_first[at] for at in layout.token_index[np.isin(layout.token_index, list(by_first))].tolist()]


def _take_own_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Slice the language model's keywords to this rank's tokens.

    These are ``inputs_embeds`` (1, T, E), ``position_ids`` (P, 1, T) and, in Qwen3-VL, ``visual_pos_masks`` (1, T) of
    image tokens and ``deepstack_visual_embeds``, (image tokens, E) for each of the first layers.
    """
    shared = kwargs.get("prefix_grouper")
    if shared is None or shared.group is None:
        return None
    num_tokens = kwargs["inputs_embeds"].shape[1] // dist.get_world_size(shared.group)
    start = num_tokens * dist.get_rank(shared.group)
    own = slice(start, start + num_tokens)
    changed = {"inputs_embeds": kwargs["inputs_embeds"][:, own], "position_ids": kwargs["position_ids"][..., own]}
    mask = kwargs.get("visual_pos_masks")
    if mask is not None:
        first, count = int(mask[:, :start].sum()), int(mask[:, own].sum())
        features = [layer[first : first + count] for layer in kwargs["deepstack_visual_embeds"]]
        changed |= {"visual_pos_masks": mask[:, own], "deepstack_visual_embeds": features}
    return args, {**kwargs, **changed}
