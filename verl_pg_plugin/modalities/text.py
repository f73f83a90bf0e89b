"""What a batch holds, as the engine packs it, and how it is read of text, whose positions count from 0."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PretrainedConfig

from verl_pg_plugin.layout import IntArray, Layout, PackedLayout

NOTHING: IntArray = np.zeros(0, dtype=np.int64)
SHARING_OFF = "set actor_rollout_ref.actor.use_prefix_grouper=False"


class BatchError(ValueError):
    """A batch that packed mode cannot compute; the message names the cause and the fix."""


@dataclass(frozen=True)
class Content:
    """B sequences of N tokens in all, laid one after the other.

    Attributes:
        tokens: (N,) ids, as the model's embedding takes them.
        keys: (N,) integers; two sequences may share a token only where theirs are equal. For text the token ids.
        offsets: (B+1,) bounds of the sequences.
        positions: (P, N) as the model takes them; None where they count from 0 in every sequence.
        inside: (N,) tokens of the same image in front of this one; None where nothing is indivisible.
        needs_encoder: whether the model's vision encoder has anything to compute for the batch they were read from.
    """

    tokens: IntArray
    keys: IntArray
    offsets: IntArray
    positions: IntArray | None = None
    inside: IntArray | None = None
    needs_encoder: bool = False

    def select(self, sequences: list[int]) -> Content:
        """Some of the sequences, in the order of ``sequences``."""
        bounds = self.offsets.tolist()
        spans = [slice(bounds[sequence], bounds[sequence + 1]) for sequence in sequences]

        def take(values: IntArray) -> IntArray:
            return np.concatenate([values[..., span] for span in spans], axis=-1)

        tokens = take(self.tokens)
        return replace(
            self,
            tokens=tokens,
            keys=tokens if self.keys is self.tokens else take(self.keys),
            offsets=np.cumsum([0, *(span.stop - span.start for span in spans)]),
            positions=None if self.positions is None else take(self.positions),
            inside=None if self.inside is None else take(self.inside),
        )

    def put_into(self, layout: PackedLayout) -> PackedLayout:
        """A layout that was made from the keys, with the tokens and positions that they stand for."""
        if self.keys is self.tokens:
            return layout
        index = layout.token_index
        positions = layout.position_ids if self.positions is None else self.positions[:, index]
        return replace(layout, input_ids=self.tokens[index], labels=self.tokens[index + 1], position_ids=positions)


def text_obstacles(config: PretrainedConfig) -> list[str]:
    """Why a model with this config does not read text alone; empty if it does."""
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):  # text of several modalities' making: its dimensions are equal
        return []
    for other in ("vision_config", "audio_config", "thinker_config"):
        if getattr(config, other, None) is not None:
            return [f"{kind} is multimodal ({other}); only text models are supported"]
    return [f"{kind} uses three-dimensional position ids (mrope)"] if "mrope_section" in rope else []


class Text:
    """Language models.

    Attributes:
        encoders: sub-configs of the parts that compute what a modality puts in place of tokens. PrefixGrouper's padded
            groups hold none.
    """

    encoders: ClassVar[tuple[str, ...]] = ()

    def install(self, module: Any) -> None:
        """Make an unwrapped transformers model read it over tokens that may be spread over ranks."""

    def read(self, data: TensorDict) -> Content:
        """The content of a batch in verl's no-padding format.

        Raises:
            BatchError: it holds something else.
        """
        tokens, offsets = read_tokens(data)
        if any(multi_modal_inputs(data)):
            raise BatchError(f"packed mode reads text only, and the batch has multi_modal_inputs; {SHARING_OFF}")
        # Sharing compares tokens only, so positions must count in each of their dimensions.
        positions, expected = read_positions(data), counted(offsets)
        if positions is not None and (positions.shape[-1] != len(expected) or not (positions == expected).all()):
            raise BatchError(
                f"position_ids do not count 0, 1, 2, ... in every sequence, which packed mode needs; {SHARING_OFF}"
            )
        return Content(tokens=tokens, keys=tokens, offsets=offsets)

    def padding_ids(self, layout: Layout, runs_encoder: bool) -> IntArray:
        """Padding tokens that ``inputs`` needs behind those of the layout."""
        return NOTHING

    def patches(self, layout: Layout, micro_batch: TensorDict) -> tuple[IntArray, IntArray]:
        """Patches of each image that the encoder computes for a layout, and of each that its sequences show."""
        return NOTHING, NOTHING

    def inputs(self, layout: Layout, micro_batch: TensorDict, runs_encoder: bool) -> dict[str, torch.Tensor] | None:
        """What ``forward`` takes beside the tokens of a layout, by keyword; None where tokens are all.

        Args:
            layout: of ``micro_batch``, or of some of its sequences that come first.
            runs_encoder: whether the vision encoder must run even if the tokens have nothing for it.
        """
        return None


TEXT = Text()


def read_tokens(data: TensorDict) -> tuple[IntArray, IntArray]:
    """Ids (N,) and offsets (B+1,) of ``input_ids``; BatchError if they are not jagged integers."""
    input_ids = data["input_ids"]
    if not input_ids.is_nested:
        raise BatchError("input_ids must be a jagged nested tensor; convert with verl's left_right_2_no_padding")
    tokens = input_ids.values()
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise BatchError(f"input_ids must be integers, got {tokens.dtype}; use torch.int64")
    return tokens.detach().cpu().numpy(), input_ids.offsets().cpu().numpy().astype(np.int64)


def read_positions(data: TensorDict) -> IntArray | None:
    """Values of ``position_ids``: (N,), or (dimensions, N) as mrope has; None if there are none."""
    position_ids = data.get("position_ids", None)
    if position_ids is None:
        return None
    if not position_ids.is_nested:
        raise BatchError("position_ids must be jagged like input_ids; convert with verl's left_right_2_no_padding")
    return position_ids.values().detach().cpu().numpy()


def multi_modal_inputs(data: TensorDict) -> list[dict[str, Any]]:
    """What verl's processor made of each sequence beside its tokens, empty where that is nothing."""
    given = data.get("multi_modal_inputs", None)
    return [] if given is None else [dict(getattr(of_one, "data", of_one) or {}) for of_one in given]


def counted(offsets: IntArray) -> IntArray:
    """Positions (N,) that count 0, 1, 2, ... in every sequence."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
