"""Pictures under Ulysses: every rank runs the tower and the embedding on all rows, then goes on with its own.

Which rows a rank has is known before the forward, and which features belong to them only behind the tower; there
transformers' language model takes over, so that is where rows are sliced.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from verl_pg_plugin.attention.context import UlyssesAttention


def slice_behind_the_tower(language_model: nn.Module) -> None:
    """Make a language model continue with this rank's rows where those of a forward are spread over ranks."""
    language_model.register_forward_pre_hook(_take_own_rows, with_kwargs=True)


def _take_own_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """This rank's part of what transformers hands to the language model, by keyword.

    ``inputs_embeds`` (1, T, E) and ``position_ids`` (P, 1, T); of Qwen3-VL ``visual_pos_masks`` (1, T), which rows
    show a picture, and ``deepstack_visual_embeds``, (pictures' rows, E) for each of the first layers.
    """
    shared = kwargs.get("prefix_grouper")
    if not isinstance(shared, UlyssesAttention):
        return None
    num_rows = shared.num_rows // dist.get_world_size(shared.group)
    start = num_rows * dist.get_rank(shared.group)
    own = slice(start, start + num_rows)
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
