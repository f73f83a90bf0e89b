"""What a model reads beside text: each distinct image goes through its vision encoder once per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from transformers import PretrainedConfig

from verl_pg_plugin.layout import IntArray, Layout, PackedLayout, Sequences, counted
from verl_pg_plugin.modalities.image_keys import Image, Kind, build_keys, find_images
from verl_pg_plugin.modalities.text import SHARING_OFF, BatchError

IMAGE_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Their language model is causal over images too, and their vision encoder looks at each image or frame alone."""

POSITION_DIMENSIONS = 4
"""verl hands over a counter of tokens, then time, height and width."""


@dataclass(frozen=True)
class Modality:
    """Images and videos as placeholders in the tokens, for which the model puts in what its vision encoder computes.

    Attributes:
        kinds: images and videos; empty of language models, which read text alone.
        merge_size: rows and columns of patches that the vision encoder merges into one token.
        patch_numbers: numbers of a patch.
    """

    kinds: tuple[Kind, ...] = ()
    merge_size: int = 1
    patch_numbers: int = 0

    @classmethod
    def of(cls, config: PretrainedConfig) -> Modality:
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

    @property
    def encoders(self) -> tuple[str, ...]:
        """Sub-configs of the parts that compute what stands in place of tokens."""
        return ("vision_config",) if self.kinds else ()

    def install(self, module: Any) -> None:
        """Under Ulysses every rank runs the vision encoder and the embedding on all tokens, then goes on with its own.

        Which features belong to a rank's tokens is known only behind the encoder; there the language model takes over.
        """
        if self.kinds:
            module.model.language_model.register_forward_pre_hook(_take_own_tokens, with_kwargs=True)

    def read(self, data: TensorDict, sequences: Sequences) -> Sequences:
        """The sequences of a batch in verl's no-padding format, with what they hold beside tokens.

        Raises:
            BatchError: it holds something else.
        """
        tokens, offsets, given = sequences.tokens, sequences.offsets, data.get("multi_modal_inputs", None)
        of_each = [] if given is None else [dict(getattr(of_one, "data", of_one) or {}) for of_one in given]
        images = find_images(tokens, offsets, of_each, self.kinds, self.merge_size**2)
        positions = _positions(data)
        if not self.kinds:
            # Sharing compares tokens only, so positions must count in each of their dimensions.
            if positions is not None and (positions.shape[-1] != offsets[-1] or (positions != counted(offsets)).any()):
                raise BatchError(
                    f"position_ids do not count 0, 1, 2, ... in every sequence, which packed mode needs; {SHARING_OFF}"
                )
            return sequences
        positions = _in_space(positions, offsets, has_images=any(images))
        keys, inside = build_keys(tokens, offsets, positions, images)
        return replace(sequences, keys=keys, positions=positions, inside=inside, images=images)

    def inputs(
        self, layout: PackedLayout, sequences: Sequences, runs_encoder: bool
    ) -> tuple[list[int], dict[str, torch.Tensor] | None]:
        """Images whose tokens are in the layout, once each and in their order, by keyword; None where text is all.

        Where there are none, a blank one, and in front the padding token that shows it, unless no rank has any in the
        whole mini-batch: FSDP gathers the vision encoder's weights on all ranks or on none. Nothing reads that token:
        its gradients are zero.

        Args:
            layout: of ``sequences``, or of a prefix of the first.
            runs_encoder: whether some rank has an image.
        """
        if not self.kinds:
            return [], None
        shown = shown_images(layout, sequences)
        if runs_encoder and not shown:
            kind, size = self.kinds[0], self.merge_size
            blank, grid = torch.zeros(size**2, self.patch_numbers), torch.tensor([(1, size, size)])
            return [kind.token_id], {kind.pixels: blank, kind.grids: grid}
        tensors: dict[str, torch.Tensor] = {}
        for kind in self.kinds:
            if of_kind := [image for image in shown if image.kind is kind]:
                tensors[kind.pixels] = torch.cat([image.pixels for image in of_kind])
                tensors[kind.grids] = torch.tensor([(1, *image.grid) for image in of_kind])
        return [], tensors


TEXT = Modality()
"""Of language models."""


def _positions(data: TensorDict) -> IntArray | None:
    """Values of ``position_ids``: (N,), or (dimensions, N) as mrope has; None if there are none."""
    position_ids = data.get("position_ids", None)
    if position_ids is None:
        return None
    if not position_ids.is_nested:
        raise BatchError("position_ids must be jagged like input_ids; convert with verl's left_right_2_no_padding")
    return position_ids.values().detach().cpu().numpy()


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
    changed = {
        "inputs_embeds": kwargs["inputs_embeds"][:, own],
        "position_ids": kwargs["position_ids"][..., own],
    }
    mask = kwargs.get("visual_pos_masks")
    if mask is not None:
        first, count = int(mask[:, :start].sum()), int(mask[:, own].sum())
        changed["visual_pos_masks"] = mask[:, own]
        changed["deepstack_visual_embeds"] = [
            features[first : first + count] for features in kwargs["deepstack_visual_embeds"]
        ]
    return args, {**kwargs, **changed}
