"""Models that read pictures: each distinct one goes through the tower once per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PretrainedConfig

from verl_pg_plugin.layout import Layout, PackedLayout
from verl_pg_plugin.layout.order import IntArray
from verl_pg_plugin.modalities.batch_error import SHARING_OFF, BatchError
from verl_pg_plugin.modalities.pictures.keys import build_keys
from verl_pg_plugin.modalities.pictures.occurrences import Kind, Picture, find_pictures
from verl_pg_plugin.modalities.pictures.sequence_parallel import slice_behind_the_tower
from verl_pg_plugin.modalities.protocol import Content, ContentInputs
from verl_pg_plugin.modalities.text import counted, multi_modal_rows, read_positions, read_tokens
from verl_pg_plugin.reason import Reason

PICTURE_MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Their language model is causal over pictures too, and their tower looks at each image or frame alone."""

POSITION_DIMENSIONS = 4
"""verl hands over a counter of tokens, then time, height and width."""


@dataclass(frozen=True)
class Pictures:
    """Images and videos as placeholders in the tokens, for which the model puts in what its tower computes.

    Attributes:
        images, videos: how they are marked.
        merge_size: rows and columns of patches that the tower merges into one row.
        patch_numbers: numbers of a patch.
    """

    name: ClassVar[str] = "pictures"
    in_padded_groups: ClassVar[bool] = False
    replaced_by_verl: ClassVar[bool] = True
    num_reserved_rows: ClassVar[int] = 1
    towers: ClassVar[tuple[str, ...]] = ("vision_config",)
    images: Kind
    videos: Kind
    merge_size: int
    patch_numbers: int

    @classmethod
    def obstacles(cls, config: PretrainedConfig) -> list[Reason]:
        if config.model_type in PICTURE_MODEL_TYPES:
            return []
        return [Reason(f"pictures are read by {', '.join(PICTURE_MODEL_TYPES)}, not by {config.model_type}")]

    @classmethod
    def of(cls, config: PretrainedConfig) -> Pictures:
        tower: Any = config.vision_config
        channels = getattr(tower, "in_channels", None) or tower.in_chans
        return cls(
            images=Kind("image", "pixel_values", "image_grid_thw", config.image_token_id),
            videos=Kind("video", "pixel_values_videos", "video_grid_thw", config.video_token_id),
            merge_size=tower.spatial_merge_size,
            patch_numbers=channels * tower.temporal_patch_size * tower.patch_size**2,
        )

    def install(self, module: Any) -> None:
        slice_behind_the_tower(module.model.language_model)

    def read(self, data: TensorDict) -> Content:
        tokens, offsets = read_tokens(data)
        rows = multi_modal_rows(data)
        pictures = self._find(tokens, offsets, rows)
        positions = self._positions(data, offsets, has_pictures=bool(pictures))
        keys, inside = build_keys(tokens, offsets, positions, pictures, rows)
        return Content(tokens, keys, offsets, positions, inside, needs_tower=bool(pictures))

    def num_padding_rows(self, layout: Layout, runs_tower: bool) -> int:
        """One for the placeholder of a blank picture where the rows show none."""
        assert isinstance(layout, PackedLayout)
        shown = np.isin(layout.input_ids, (self.images.token_id, self.videos.token_id)).any()
        return self.num_reserved_rows if runs_tower and not shown else 0

    def inputs(self, layout: Layout, micro_batch: TensorDict, runs_tower: bool) -> ContentInputs:
        """Pictures whose rows are in the layout, once each and in the order of rows.

        Where there are none, a blank one in a padding row, unless no rank has any in the whole mini-batch: FSDP gathers
        the tower's weights on all ranks or on none. Nothing reads that row, so its gradients are zero.
        """
        if self.num_padding_rows(layout, runs_tower):
            return self._blank()
        rows = multi_modal_rows(micro_batch)
        shown, _ = self._shown(layout, micro_batch)
        tensors: dict[str, torch.Tensor] = {}
        for kind in (self.images, self.videos):
            of_kind = [picture for picture in shown if picture.kind is kind]
            if of_kind:
                pixels = [rows[picture.sequence][kind.pixels][picture.patches] for picture in of_kind]
                tensors[kind.pixels] = torch.cat(pixels)
                tensors[kind.grids] = torch.tensor([(1, *picture.grid) for picture in of_kind])
        return ContentInputs(tensors, padding_ids=np.zeros(0, dtype=np.int64))

    def patches(self, layout: Layout, micro_batch: TensorDict) -> tuple[IntArray, IntArray]:
        """Without those of a blank picture."""
        shown, all_pictures = self._shown(layout, micro_batch)
        return _num_patches(shown), _num_patches(all_pictures)

    def _shown(self, layout: Layout, micro_batch: TensorDict) -> tuple[list[Picture], list[Picture]]:
        """Pictures whose rows are in the layout, in their order, and all of the micro-batch."""
        assert isinstance(layout, PackedLayout)
        tokens, offsets = read_tokens(micro_batch)
        pictures = self._find(tokens, offsets, multi_modal_rows(micro_batch))
        by_first = {picture.first: picture for picture in pictures}
        starts = layout.token_index[np.isin(layout.token_index, list(by_first))]
        return [by_first[at] for at in starts.tolist()], pictures

    def _blank(self) -> ContentInputs:
        patches = torch.zeros(self.merge_size**2, self.patch_numbers)
        grid = torch.tensor([(1, self.merge_size, self.merge_size)])
        return ContentInputs(
            {self.images.pixels: patches, self.images.grids: grid}, padding_ids=np.array([self.images.token_id])
        )

    def _find(self, tokens: IntArray, offsets: IntArray, rows: list[dict[str, Any]]) -> list[Picture]:
        return find_pictures(tokens, offsets, rows, (self.images, self.videos), self.merge_size**2)

    def _positions(self, data: TensorDict, offsets: IntArray, has_pictures: bool) -> IntArray:
        """(4, N) positions; text alone may have one counter, or none, which is then counted."""
        given = read_positions(data)
        if given is not None and given.shape == (POSITION_DIMENSIONS, offsets[-1]):
            return given
        if has_pictures or (given is not None and given.shape != (offsets[-1],)):
            shape = "no position_ids" if given is None else f"position_ids of shape {given.shape}"
            raise BatchError(
                f"a batch with pictures needs position_ids of shape ({POSITION_DIMENSIONS}, {offsets[-1]}), as verl's "
                f"agent loop makes them, and has {shape}; {SHARING_OFF}"
            )
        return np.broadcast_to(counted(offsets) if given is None else given, (POSITION_DIMENSIONS, offsets[-1]))


def _num_patches(pictures: list[Picture]) -> IntArray:
    return np.array([picture.patches.stop - picture.patches.start for picture in pictures], dtype=np.int64)
