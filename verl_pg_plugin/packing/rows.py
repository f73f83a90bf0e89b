"""Packing of samples into rows of a fixed length.

A row has `pack_num` slots. A sample's slot holds its tokens and one EOS; the last sample's slot also holds the row's
padding; every missing sample has a dummy slot of one EOS.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample", bound=Mapping[str, Any])


class _Tokens(NamedTuple):
    """A sample without padding."""

    ids: np.ndarray
    response_mask: np.ndarray
    advantage: float


def pack_grpo_data(
    prompt_completion_ids: ArrayLike,
    prompts_mask: ArrayLike,
    responses_mask: ArrayLike,
    advantages: ArrayLike,
    pack_num: int = 1,
    *,
    seq_length: int,
    pad_token_id: int,
) -> list[dict[str, np.ndarray]]:
    """Remove a batch's padding and pack it, in order, into rows of `seq_length` tokens.

    A sample runs from the first set position of its prompt mask to the last set position of its response mask.
    Samples whose prompt or response mask is empty are dropped with a warning.

    Args:
        prompt_completion_ids: (bs, seq) integer token ids.
        prompts_mask: (bs, seq) 0/1 or bool, 1 on prompt tokens.
        responses_mask: the same for response tokens.
        advantages: bs numbers, of any shape.
        pack_num: maximum number of samples in a row.
        seq_length: tokens in a row.
        pad_token_id: the tokenizer's EOS, which ends samples and fills padding and dummies.

    Returns:
        One dict for each row, as `pack_grouped_data` returns it.
    """
    ids = _matrix("prompt_completion_ids", prompt_completion_ids)
    prompt_mask = _matrix("prompts_mask", prompts_mask)
    response_mask = _matrix("responses_mask", responses_mask)
    advantage = np.asarray(advantages).reshape(-1)
    if not ids.shape == prompt_mask.shape == response_mask.shape:
        raise ValueError(
            "prompt_completion_ids, prompts_mask and responses_mask must have one shape (bs, seq), got "
            f"{ids.shape}, {prompt_mask.shape} and {response_mask.shape}"
        )
    bs, seq = ids.shape
    if len(advantage) != bs:
        raise ValueError(f"advantages must hold one number for each of the {bs} samples, got {len(advantage)}")
    is_prompt, is_response = prompt_mask != 0, response_mask != 0
    has_prompt, has_response = is_prompt.any(axis=1), is_response.any(axis=1)
    start, from_end = is_prompt.argmax(axis=1), is_response[:, ::-1].argmax(axis=1)
    for name, is_dropped in (("prompts_mask", ~has_prompt), ("responses_mask", has_prompt & ~has_response)):
        if is_dropped.any():
            logger.warning("dropping samples %s: their %s is all zero", np.flatnonzero(is_dropped).tolist(), name)
    kept = np.flatnonzero(has_prompt & has_response).tolist()
    spans = [slice(int(start[b]), seq - int(from_end[b])) for b in kept]
    samples = [_Tokens(ids[b, span], response_mask[b, span], advantage[b]) for b, span in zip(kept, spans, strict=True)]
    bounds = _pack_bounds([len(sample.ids) for sample in samples], pack_num, seq_length, kept)
    return [_fill_row(samples[first:last], pack_num, seq_length, pad_token_id) for first, last in pairwise(bounds)]


def create_pack_group(samples: Sequence[Sample], pack_num: int, seq_length: int) -> list[list[Sample]]:
    """Cut a list of samples, in order, into packs that fit one row each.

    A pack has at most `pack_num` samples, whose tokens plus one EOS for each of `pack_num` slots fit `seq_length`.

    Args:
        samples: mappings with integers `prompt_start_idx` and `response_end_index` (both inclusive); not copied.
    """
    num_tokens = [int(sample["response_end_index"]) + 1 - int(sample["prompt_start_idx"]) for sample in samples]
    bounds = _pack_bounds(num_tokens, pack_num, seq_length, range(len(samples)))
    return [list(samples[first:last]) for first, last in pairwise(bounds)]


def pack_grouped_data(
    pack_list: Sequence[Mapping[str, Any]], pack_num: int = 1, *, seq_length: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Pack one group of samples into one row of `seq_length` tokens.

    Args:
        pack_list: 1 to `pack_num` mappings with `prompt_completion_ids` and `response_mask` (1-D, equally long),
            `advantage` (a number), `prompt_start_idx` and `response_end_index` (both inclusive).
        pack_num: slots of the row, dummies included.
        seq_length: as in `pack_grpo_data`, like `pad_token_id`.

    Returns:
        `prompt_completion_ids` (seq_length,) int64;
        `responses_mask` (seq_length,) int64, 0 on EOS, padding and dummies;
        `advantages` (seq_length,) float64, the sample's on its tokens and its EOS, 0 on padding and dummies;
        `sample_index` (seq_length,) int64, the slot of each token; padding belongs to the last sample;
        `actual_sequence_length` (pack_num,) int64, cumulative ends of the slots, the last one `seq_length`;
        `sample_valid_length` (pack_num,) int64, response tokens of each sample, 1 for a dummy.
    """
    if not 1 <= len(pack_list) <= pack_num:
        raise ValueError(f"a pack needs at least 1 and at most pack_num={pack_num} samples, got {len(pack_list)}")
    samples = [_tokens(sample) for sample in pack_list]
    num_tokens = [len(sample.ids) for sample in samples]
    _check_samples_fit(num_tokens, pack_num, seq_length, range(len(samples)))
    if (needed := sum(num_tokens) + pack_num) > seq_length:
        raise ValueError(
            f"the pack needs {needed} tokens, but seq_length is {seq_length}: "
            "raise seq_length, or group the samples with create_pack_group"
        )
    return _fill_row(samples, pack_num, seq_length, pad_token_id)


def pad_sequence_to_length(sequence: ArrayLike, target_length: int, pad_value: float) -> np.ndarray:
    """Return `sequence` (1-D) padded with `pad_value` to `target_length`, in its dtype."""
    array = np.asarray(sequence)
    if array.ndim != 1:
        raise ValueError(f"sequence must be 1-D, got shape {array.shape}")
    if len(array) > target_length:
        raise ValueError(f"a sequence of {len(array)} cannot be padded to {target_length}: it would lose tokens")
    padded = np.full(target_length, pad_value, dtype=array.dtype)  # raises if the dtype cannot hold the value
    padded[: len(array)] = array
    return padded


def _fill_row(samples: list[_Tokens], pack_num: int, seq_length: int, pad_token_id: int) -> dict[str, np.ndarray]:
    """Return one row of samples that fit it."""
    ids = np.full(seq_length, pad_token_id, dtype=np.int64)
    mask, slots = np.zeros(seq_length, dtype=np.int64), np.empty(seq_length, dtype=np.int64)
    advantages = np.zeros(seq_length)
    first_dummy = seq_length - (pack_num - len(samples))
    ends, valid = np.empty(pack_num, dtype=np.int64), np.ones(pack_num, dtype=np.int64)
    start = 0
    for slot, sample in enumerate(samples):
        eos = start + len(sample.ids)
        ids[start:eos] = sample.ids
        mask[start:eos] = sample.response_mask
        advantages[start : eos + 1] = sample.advantage
        stop = eos + 1 if slot < len(samples) - 1 else first_dummy
        slots[start:stop] = slot
        ends[slot], valid[slot] = stop, mask[start:eos].sum()
        start = stop
    slots[first_dummy:] = np.arange(len(samples), pack_num)
    ends[len(samples) :] = np.arange(first_dummy, seq_length) + 1
    return {
        "prompt_completion_ids": ids,
        "responses_mask": mask,
        "advantages": advantages,
        "actual_sequence_length": ends,
        "sample_index": slots,
        "sample_valid_length": valid,
    }


def _tokens(sample: Mapping[str, Any]) -> _Tokens:
    ids, mask = np.asarray(sample["prompt_completion_ids"]), np.asarray(sample["response_mask"])
    first, last = int(sample["prompt_start_idx"]), int(sample["response_end_index"])
    if ids.ndim != 1 or ids.shape != mask.shape:
        raise ValueError(
            "prompt_completion_ids and response_mask of a sample must be 1-D and equally long, got shapes "
            f"{ids.shape} and {mask.shape}"
        )
    if first < 0 or last >= len(ids):
        raise ValueError(
            f"prompt_start_idx {first} and response_end_index {last} must be inside a sequence of {len(ids)} tokens"
        )
    return _Tokens(ids[first : last + 1], mask[first : last + 1], float(sample["advantage"]))


def _pack_bounds(num_tokens: list[int], pack_num: int, seq_length: int, names: Sequence[int]) -> list[int]:
    """Return the first sample of every pack, then the number of samples; errors use `names`."""
    _check_samples_fit(num_tokens, pack_num, seq_length, names)
    bounds, tokens_in_pack = [0], 0
    for sample, tokens in enumerate(num_tokens):
        # A row also holds one EOS for each of its pack_num slots, dummies included.
        if sample - bounds[-1] == pack_num or tokens_in_pack + tokens + pack_num > seq_length:
            bounds.append(sample)
            tokens_in_pack = 0
        tokens_in_pack += tokens
    return [*bounds, len(num_tokens)] if num_tokens else bounds


def _check_samples_fit(num_tokens: list[int], pack_num: int, seq_length: int, names: Sequence[int]) -> None:
    if pack_num < 1:
        raise ValueError(f"pack_num must be at least 1, got {pack_num}")
    if empty := [name for name, tokens in zip(names, num_tokens, strict=True) if tokens < 1]:
        raise ValueError(f"samples {empty} hold no tokens: their responses end before their prompts start")
    longest = max(num_tokens, default=0)
    if num_tokens and (needed := longest + pack_num) > seq_length:
        raise ValueError(
            f"sample {names[num_tokens.index(longest)]} has {longest} tokens and needs a row of {needed} (with its EOS "
            f"and {pack_num - 1} dummy slots), but seq_length is {seq_length}: raise seq_length to at least {needed}, "
            "or shorten the sample"
        )


def _matrix(name: str, values: ArrayLike) -> np.ndarray:
    matrix = np.asarray(values)  # raises ValueError for ragged rows
    if matrix.ndim != 2 or matrix.shape[1] == 0:
        raise ValueError(f"{name} must have shape (bs, seq) with seq >= 1, got {matrix.shape}")
    return matrix
