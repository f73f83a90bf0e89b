"""Filling rows of one fixed length with packed samples.

A row has `pack_num` slots. A sample's slot holds its tokens and one EOS; the slot of the row's last sample also
holds the row's padding; every missing sample has a dummy slot of one EOS.

Shape suffixes: B samples, P packs, N slots of a pack (`pack_num`), R runs of a slot (tokens, EOS, the rest),
F tokens of all samples laid end to end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from verl_pg_plugin.packing.pack_group import check_samples_fit


@dataclass(frozen=True)
class UnpaddedSamples:
    """Samples laid end to end without padding.

    Args:
        ids: (F,) integer token ids.
        response_mask: (F,) 0/1 or bool, 1 on response tokens.
        num_tokens: (B,) int64 tokens of each sample, at least 1.
        advantages: (B,) numbers.
    """

    ids: np.ndarray
    response_mask: np.ndarray
    num_tokens: np.ndarray
    advantages: np.ndarray


def pack_grouped_data(
    pack_list: Sequence[Mapping[str, Any]], pack_num: int = 1, *, seq_length: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Pack one group of samples into one row of `seq_length` tokens.

    Values equal those of both versions in seed 000; dtypes are those of its updated version.

    Args:
        pack_list: 1 to `pack_num` mappings with `prompt_completion_ids` and `response_mask` (1-D, equally long),
            `advantage` (a number), `prompt_start_idx` and `response_end_index` (both inclusive). A `prompt_mask`
            may be present and is not read.
        pack_num: samples a row holds once dummies are added.
        seq_length: tokens in the row.
        pad_token_id: written after every sample, as padding and in dummies (the tokenizer's EOS).

    Returns:
        `prompt_completion_ids` (seq_length,) int64;
        `responses_mask` (seq_length,) int64, 0 on EOS, padding and dummies;
        `advantages` (seq_length,) float64, the sample's on its tokens and its EOS, 0 on padding and dummies;
        `sample_index` (seq_length,) int64, the slot of each token; padding belongs to the last sample;
        `actual_sequence_length` (pack_num,) int64, cumulative ends of the slots, the last one `seq_length`;
        `sample_valid_length` (pack_num,) int64, response tokens of each sample, 1 for a dummy.

    Raises:
        ValueError: an empty or overfull `pack_list`, ragged or out-of-range samples, or samples that do not fit.
    """
    if not 1 <= len(pack_list) <= pack_num:
        raise ValueError(f"a pack needs at least 1 and at most pack_num={pack_num} samples, got {len(pack_list)}")
    samples = _unpadded(pack_list, pack_num, seq_length)
    return fill_rows(samples, [0, len(pack_list)], pack_num, seq_length, pad_token_id)[0]


def pad_sequence_to_length(sequence: ArrayLike, target_length: int, pad_value: float) -> np.ndarray:
    """`sequence` (1-D) with `pad_value` appended up to `target_length`; the dtype is kept.

    Raises:
        ValueError: `sequence` is not 1-D or is longer than `target_length`.
    """
    array = np.asarray(sequence)
    if array.ndim != 1:
        raise ValueError(f"sequence must be 1-D, got shape {array.shape}")
    if len(array) > target_length:
        raise ValueError(f"a sequence of {len(array)} cannot be padded to {target_length}: it would lose tokens")
    padded = np.full(target_length, pad_value, dtype=array.dtype)
    padded[: len(array)] = array
    return padded


def fill_rows(
    samples: UnpaddedSamples, bounds: list[int], pack_num: int, seq_length: int, pad_token_id: int
) -> list[dict[str, np.ndarray]]:
    """Write every pack `bounds[p]:bounds[p + 1]` of `samples` into a row; see `pack_grouped_data` for the result.

    The rows of one call are views into shared arrays; no two of them overlap.

    Raises:
        ValueError: a pack that does not fit `seq_length`.
    """
    num_packs = len(bounds) - 1
    bounds_P = np.array(bounds)
    count_P = bounds_P[1:] - bounds_P[:-1]
    slot_N = np.arange(pack_num)
    real_PN = slot_N < count_P[:, None]
    length_PNR = np.zeros((num_packs, pack_num, 3), dtype=np.int64)
    length_PNR[real_PN, 0] = samples.num_tokens
    length_PNR[..., 1] = 1
    span_PN = length_PNR.sum(axis=2)
    slack_P = seq_length - span_PN.sum(axis=1)
    if (slack_P < 0).any():
        pack = int(slack_P.argmin())
        raise ValueError(
            f"pack {pack} needs {seq_length - int(slack_P[pack])} tokens, but seq_length is {seq_length}: "
            "raise seq_length, or group the samples with create_pack_group"
        )
    last_real = np.arange(num_packs), count_P - 1
    length_PNR[(*last_real, 2)] = slack_P
    span_PN[last_real] += slack_P
    end_PN = span_PN.cumsum(axis=1)

    # One table holds what each run is filled with, one repeat expands all four columns; a float64 fits an int64's
    # place bit for bit.
    run_values = np.zeros((4, num_packs, pack_num, 3), dtype=np.int64)
    run_values[0] = pad_token_id
    run_values.view(np.float64)[2, real_PN, :2] = samples.advantages[:, None]
    run_values[3] = slot_N[:, None]
    run_length = length_PNR.ravel()
    ids, mask, advantages, sample_index = run_values.reshape(4, -1).repeat(run_length, axis=1)
    # Boolean indexing copies whole runs, at about the cost of a memcpy; integer indices would cost a gather.
    holds_token = (np.arange(run_length.size) % 3 == 0).repeat(run_length)
    ids[holds_token] = samples.ids
    mask[holds_token] = samples.response_mask
    slot_end = span_PN.cumsum()
    valid_PN = np.add.reduceat(mask, slot_end - span_PN.ravel()).reshape(num_packs, pack_num)
    valid_PN[~real_PN] = 1

    columns = {
        "prompt_completion_ids": ids.reshape(num_packs, seq_length),
        "responses_mask": mask.reshape(num_packs, seq_length),
        "advantages": advantages.view(np.float64).reshape(num_packs, seq_length),
        "actual_sequence_length": end_PN,
        "sample_index": sample_index.reshape(num_packs, seq_length),
        "sample_valid_length": valid_PN,
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _unpadded(pack_list: Sequence[Mapping[str, Any]], pack_num: int, seq_length: int) -> UnpaddedSamples:
    """Read a pack's mappings: the one place that visits samples one by one, to slice them.

    Raises ValueError for samples that are ragged, out of range or too long for a row.
    """
    ids = [np.asarray(sample["prompt_completion_ids"]) for sample in pack_list]
    masks = [np.asarray(sample["response_mask"]) for sample in pack_list]
    start = [int(sample["prompt_start_idx"]) for sample in pack_list]
    stop = [int(sample["response_end_index"]) + 1 for sample in pack_list]
    shapes = [array.shape for array in ids]
    if shapes != [array.shape for array in masks] or any(len(shape) != 1 for shape in shapes):
        raise ValueError(
            "prompt_completion_ids and response_mask of a sample must be 1-D and equally long, got shapes "
            f"{shapes} and {[array.shape for array in masks]}"
        )
    if min(start) < 0 or any(last > size for last, (size,) in zip(stop, shapes, strict=True)):
        raise ValueError(
            f"prompt_start_idx {start} and response_end_index {[last - 1 for last in stop]} must lie inside "
            f"sequences of {[size for (size,) in shapes]} tokens"
        )
    tokens_B = np.subtract(stop, start)
    check_samples_fit(tokens_B, pack_num, seq_length)
    spans = [slice(*span) for span in zip(start, stop, strict=True)]
    return UnpaddedSamples(
        ids=np.concatenate([array[span] for array, span in zip(ids, spans, strict=True)]),
        response_mask=np.concatenate([array[span] for array, span in zip(masks, spans, strict=True)]),
        num_tokens=tokens_B,
        advantages=np.array([sample["advantage"] for sample in pack_list], dtype=np.float64).reshape(-1),
    )
