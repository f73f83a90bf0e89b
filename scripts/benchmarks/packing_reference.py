"""The packing operations as plain loops, one row or one sample at a time: the specification that tests compare with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def segment_sum_by_row(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Sum each row of (bs, seq) values by its (bs, seq) int64 ids; return (bs, num_segments)."""
    rows = zip(segment_ids, values, strict=True)
    return torch.stack([values.new_zeros(num_segments).scatter_add_(0, ids, row) for ids, row in rows])


def group_by_loop(samples: Sequence[Mapping[str, Any]], pack_num: int, seq_length: int) -> list[list[Any]]:
    """Pack greedily, one sample at a time; arguments as in `create_pack_group`."""
    packs: list[list[Any]] = []
    occupied = 0
    for sample in samples:
        length = sample["response_end_index"] - sample["prompt_start_idx"] + 2
        if packs and len(packs[-1]) < pack_num and occupied + length + pack_num - len(packs[-1]) - 1 <= seq_length:
            packs[-1].append(sample)
            occupied += length
        else:
            packs.append([sample])
            occupied = length
    return packs


def pack_by_sample(
    pack_list: Sequence[Mapping[str, Any]], pack_num: int, *, seq_length: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Build one packed row token by token; arguments as in `pack_grouped_data`."""
    tokens: list[tuple[int, int, float, int]] = []  # id, response mask, advantage and slot
    ends: list[int] = []
    valid: list[int] = []
    for slot, sample in enumerate(pack_list):
        span = slice(sample["prompt_start_idx"], sample["response_end_index"] + 1)
        ids, mask, advantage = sample["prompt_completion_ids"][span], sample["response_mask"][span], sample["advantage"]
        tokens += [(token, is_response, advantage, slot) for token, is_response in zip(ids, mask, strict=True)]
        tokens.append((pad_token_id, 0, advantage, slot))
        if slot == len(pack_list) - 1:
            num_padding = seq_length - (pack_num - len(pack_list)) - len(tokens)
            tokens += [(pad_token_id, 0, 0.0, slot)] * num_padding
        ends.append(len(tokens))
        valid.append(sum(mask))
    for dummy in range(len(pack_list), pack_num):
        tokens.append((pad_token_id, 0, 0.0, dummy))
        ends.append(len(tokens))
        valid.append(1)
    ids, masks, advantages, slots = zip(*tokens, strict=True)
    row = {
        "prompt_completion_ids": ids,
        "responses_mask": masks,
        "advantages": advantages,
        "actual_sequence_length": ends,
        "sample_index": slots,
        "sample_valid_length": valid,
    }
    return {name: np.array(column) for name, column in row.items()}


def samples_by_row(
    prompt_completion_ids: np.ndarray, prompts_mask: np.ndarray, responses_mask: np.ndarray, advantages: np.ndarray
) -> list[dict[str, Any]]:
    """Return the samples of a (bs, seq) batch that have a prompt and a response."""
    samples = []
    for row, advantage in enumerate(advantages.reshape(-1)):
        prompt, response = (np.nonzero(mask[row])[0] for mask in (prompts_mask, responses_mask))
        if len(prompt) and len(response):
            sample = {
                "prompt_completion_ids": prompt_completion_ids[row],
                "prompt_mask": prompts_mask[row],
                "response_mask": responses_mask[row],
                "advantage": advantage,
                "prompt_start_idx": prompt[0],
                "response_end_index": response[-1],
            }
            samples.append(sample)
    return samples


def pack_batch_by_row(
    *batch: np.ndarray, pack_num: int = 1, seq_length: int, pad_token_id: int
) -> list[dict[str, np.ndarray]]:
    """Pack a batch; arguments as in `pack_grpo_data`."""
    packs = group_by_loop(samples_by_row(*batch), pack_num, seq_length)
    return [pack_by_sample(pack, pack_num, seq_length=seq_length, pad_token_id=pad_token_id) for pack in packs]
