"""Images and videos: each distinct image goes through its vision encoder once per micro-batch.

Placeholders mark images in the tokens; patches are in what verl's processor made of them. Token ids do not tell two
images apart, since both are tokens of one placeholder. So sequences get keys: the tokens of an image that of its
content, and equal keys mean equal pixels, bit for bit. verl runs its processor anew for every response, so neither uid
nor object identity tells. Positions enter as steps from token to token. Equal keys so have equal positions.
"""

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
from verl_pg_plugin.modalities.modality import Kind, Modality, read_outputs, read_positions

IMAGE_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Their language model is causal over images too, and their vision encoder looks at each image or frame alone."""

POSITION_DIMENSIONS = 4
"""verl hands over a counter of tokens, then time, height and width."""

FIRST_KEY = 1 << 31
"""Keys from here on stand for more than a token."""


@dataclass(frozen=True, eq=False)
class Image:
    """An image or a frame of a video, where it occurs: the vision encoder looks at each frame alone."""

    kind: Kind
    first: int  # its first placeholder, counted from the start of the sequence
    num_tokens: int  # placeholders, which follow each other
    pixels: torch.Tensor  # (patches, numbers), a view
    grid: tuple[int, int]  # rows and columns of patches


@dataclass(frozen=True, kw_only=True)
class Images(Modality):
    """Images and videos as placeholders in the tokens, for which the model puts in what its vision encoder computes."""

    merge_size: int  # rows and columns of patches that the vision encoder merges into one token
    patch_numbers: int  # numbers of a patch

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Images":
        """Of a model that reads images."""
        vision: Any = config.vision_config
        channels = getattr(vision, "in_channels", None) or vision.in_chans
        return cls(
            kinds=(
                Kind("image", "pixel_values", "image_grid_thw", config.image_token_id),
                Kind("video", "pixel_values_videos", "video_grid_thw", config.video_token_id),
            ),
            merge_size=vision.spatial_merge_size,
            patch_numbers=channels * vision.temporal_patch_size * vision.patch_size**2,
        )

    def install(self, module: Any) -> None:
        """Under Ulysses every rank runs the vision encoder and the embedding on all tokens, then goes on with its own.

        Which features belong to a rank's tokens is known only behind the encoder; there the language model takes over.
        """
        module.model.language_model.register_forward_pre_hook(_take_own_tokens, with_kwargs=True)

    def read(self, data: TensorDict, sequences: Sequences) -> Sequences:
        """The sequences of a batch in verl's no-padding format, with what they hold beside tokens, or BatchError."""
        names = frozenset(name for kind in self.kinds for name in (kind.pixels, kind.grids))
        images = self._find_images(sequences, read_outputs(data, names))
        positions = _in_space(read_positions(data), sequences.offsets, has_images=any(images))
        keys, offset_in_image = _build_keys(sequences, positions, images)
        return replace(sequences, keys=keys, positions=positions, offset_in_image=offset_in_image, images=images)

    def _find_images(self, sequences: Sequences, given: list[dict[str, Any]]) -> list[list[Image]]:
        """The images of each sequence, in the order of their first placeholders.

        ``given`` are verl's ``multi_modal_inputs`` of each; an empty list if the batch has none.
        """
        places = {kind: np.flatnonzero(sequences.tokens == kind.token_id) for kind in self.kinds}
        bounds = sequences.offsets.tolist()
        found: list[list[Image]] = []
        for sequence, (start, stop) in enumerate(pairwise(bounds)):
            of_one = given[sequence] if given else {}
            images: list[Image] = []
            for kind, at in places.items():
                first, last = np.searchsorted(at, [start, stop])
                images += _images_of(sequence, of_one, kind, at[first:last] - start, self.merge_size**2)
            images.sort(key=lambda image: image.first)
            if images and images[-1].first + images[-1].num_tokens == stop - start:
                raise BatchError(
                    f"sequence {sequence} ends in an image, and no token follows that its last token could predict; "
                    "drop it, or raise data.max_response_length so that tool results are not cut off"
                )
            found.append(images)
        return found

    def inputs(
        self, layout: PackedLayout, sequences: Sequences, shown: frozenset[Kind]
    ) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Images whose tokens are in the layout, once each and in their order, by keyword.

        A kind that is shown elsewhere alone gets a blank one, and a token of the padding shows it: the model runs its
        vision encoder once for each kind, and FSDP gathers weights on all ranks or on none. Its gradients are zero.

        Args:
            layout: of ``sequences``, or of a prefix of the first.
            shown: kinds that some rank has in the mini-batch.
        """
        images, size = shown_images(layout, sequences), self.merge_size
        padding: list[int] = []
        tensors: dict[str, torch.Tensor] = {}
        for kind in self.kinds:
            if of_kind := [image for image in images if image.kind is kind]:
                tensors[kind.pixels] = torch.cat([image.pixels for image in of_kind])
                tensors[kind.grids] = torch.tensor([(1, *image.grid) for image in of_kind])
            elif kind in shown:
                padding.append(kind.token_id)
                tensors[kind.pixels] = torch.zeros(size**2, self.patch_numbers)
                tensors[kind.grids] = torch.tensor([(1, size, size)])
        return padding, tensors


def _in_space(given: IntArray | None, offsets: IntArray, has_images: bool) -> IntArray:
    """(4, N) positions; text alone may have one counter, or none, which is then counted."""
    if given is not None and given.shape == (POSITION_DIMENSIONS, offsets[-1]):
        return given
    if has_images or (given is not None and given.shape != (offsets[-1],)):
        shape = "no position_ids" if given is None else f"position_ids of shape {given.shape}"
        raise BatchError(
            f"a batch with images needs position_ids of shape ({POSITION_DIMENSIONS}, {offsets[-1]}), as verl's "
            f"agent loop makes them, and has {shape}; {SHARING_OFF}"
        )
    return np.broadcast_to(counted(offsets) if given is None else given, (POSITION_DIMENSIONS, offsets[-1]))


def _images_of(
    sequence: int, given: Mapping[str, Any], kind: Kind, places: IntArray, patches_per_token: int
) -> Iterator[Image]:
    """Images of one kind in one sequence, whose placeholders stand at ``places``."""
    grids, pixels = given.get(kind.grids), given.get(kind.pixels)
    sizes: list[list[int]] = [] if grids is None else grids.tolist()
    frames = [(height, width) for num_frames, height, width in sizes for _ in range(num_frames)]
    needed = sum(height * width for height, width in frames)
    pixels = () if pixels is None else pixels
    if len(pixels) != needed:
        raise BatchError(f"sequence {sequence}: {kind.pixels} has {len(pixels)} patches, {kind.grids} ask for {needed}")
    patch = token = 0
    for height, width in frames:
        num_tokens = height * width // patches_per_token
        mine = places[token : token + num_tokens]
        if len(mine) < num_tokens or mine[-1] - mine[0] != num_tokens - 1:
            break
        stop = patch + height * width
        yield Image(kind, int(mine[0]), num_tokens, pixels[patch:stop], grid=(height, width))
        patch, token = stop, token + num_tokens
    if token != len(places) or patch != needed:
        raise BatchError(
            f"sequence {sequence} has {len(places)} placeholders {kind.token_id}, its {len(sizes)} {kind.name}s need "
            f"{needed // patches_per_token}, each in one piece: a response has sampled the placeholder (ban it in the "
            "rollout), or a tool result was cut off (raise data.max_response_length), or the prompt was "
            "(data.filter_overlong_prompts=True)"
        )


def _build_keys(
    sequences: Sequences, positions: IntArray, images: Sequence[Sequence[Image]]
) -> tuple[IntArray, IntArray]:
    """Keys, and what is indivisible, (N,) each, of sequences with (4, N) positions; see ``Sequences``."""
    tokens, starts = sequences.tokens, sequences.offsets[:-1]
    keys, offset_in_image = tokens.astype(np.int64), np.zeros(len(tokens), dtype=np.int64)
    before = np.roll(positions, 1, axis=1)
    before[:, starts] = -1
    steps = positions - before
    unusual = (steps != 1).any(axis=0)
    key_of: dict[Hashable, int] = {}
    known: dict[Hashable, list[torch.Tensor]] = {}
    for start, of_one in zip(starts, images, strict=True):
        for image in of_one:
            span = slice(start + image.first, start + image.first + image.num_tokens)
            shown = (_content(known, image), steps[:, span].tobytes())
            keys[span] = FIRST_KEY + key_of.setdefault(shown, len(key_of))
            offset_in_image[span] = np.arange(image.num_tokens)
            unusual[span] = False
    for at in np.flatnonzero(unusual).tolist():  # the first token behind an image, as a rule
        keys[at] = FIRST_KEY + key_of.setdefault((int(tokens[at]), steps[:, at].tobytes(), "token"), len(key_of))
    return keys, offset_in_image


def _content(known: dict[Hashable, list[torch.Tensor]], image: Image) -> Hashable:
    """What stands for a content: equal ones are the same kind, grid, dtype and pixels.

    The sum of all words finds those that should be equal, and then they are compared: no hash decides. Both run on all
    threads at the speed of memory; a batch of 32 images of 1,024 tokens holds 0.8 GB.
    """
    words = image.pixels.contiguous().cpu().view(torch.int64)  # every patch has a multiple of 8 bytes
    shown = (image.kind.name, image.grid, image.pixels.dtype, image.pixels.shape, int(words.sum()))
    alike = known.setdefault(shown, [])
    number = next((number for number, other in enumerate(alike) if torch.equal(other, words)), len(alike))
    if number == len(alike):
        alike.append(words)
    return shown, number


def shown_images(layout: Layout, sequences: Sequences) -> list[Image]:
    """Images whose tokens are in the layout, in their order."""
    assert isinstance(layout, PackedLayout)
    starts = zip(sequences.offsets.tolist(), sequences.images, strict=False)
    by_first = {start + image.first: image for start, images in starts for image in images}
    return [by_first[at] for at in layout.token_index[np.isin(layout.token_index, list(by_first))].tolist()]


def _take_own_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """This rank's part of what transformers hands to the language model, by keyword.

    ``inputs_embeds`` (1, T, E) and ``position_ids`` (P, 1, T); of Qwen3-VL ``visual_pos_masks`` (1, T), which tokens
    show an image, and ``deepstack_visual_embeds``, (their number, E) for each of the first layers.
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
        features = [of_layer[first : first + count] for of_layer in kwargs["deepstack_visual_embeds"]]
        changed |= {"visual_pos_masks": mask[:, own], "deepstack_visual_embeds": features}
    return args, {**kwargs, **changed}
