"""Filling rows of one fixed length with packed samples.

A row has `pack_num` slots. A sample's slot holds its tokens and one EOS; the slot of the row's last sample also
holds the row's padding; every missing sample has a dummy slot of one EOS.

Shape suffixes: B samples, P packs, N slots of a pack (`pack_num`), R runs of a sample (tokens and EOS, the rest).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from verl_pg_plugin.packing.pack_group import check_samples_fit

# From the places that follow each sample's tokens up to the next sample (its EOS and, for the last of a row, the row's
# padding and dummies) to the columns of token ids and of the response mask, int64, all rows laid end to end.
PlaceTokens = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def pack_grouped_data(
    pack_list: Sequence[Mapping[str, Any]], pack_num: int = 1, *, seq_length: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Pack one group of samples into one row of `seq_length` tokens.

    Values equal those of a loop over samples (`scripts/benchmarks/packing_reference.py`).

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
    ids, masks = _unpadded(pack_list)
    num_tokens = [len(piece) for piece in ids]
    check_samples_fit(num_tokens, pack_num, seq_length)
    advantages = np.array([sample["advantage"] for sample in pack_list], dtype=np.float64).reshape(-1)

    def place_tokens(gap_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _with_gaps(ids, gap_B.tolist(), pad_token_id), _with_gaps(masks, gap_B.tolist(), 0)

    return fill_rows(np.array(num_tokens), advantages, place_tokens, [0, len(pack_list)], pack_num, seq_length)[0]


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
    tokens_B: np.ndarray,
    advantage_B: np.ndarray,
    place_tokens: PlaceTokens,
    bounds: list[int],
    pack_num: int,
    seq_length: int,
) -> list[dict[str, np.ndarray]]:
    """Write every pack of samples `bounds[p]:bounds[p + 1]` into a row; see `pack_grouped_data` for the result.

    The rows of one call are views into shared arrays; no two of them overlap.

    Args:
        tokens_B: int64 tokens of each sample, at least 1.
        advantage_B: numbers.
        place_tokens: lays the samples' own columns out; called once.
        bounds, pack_num, seq_length: as `pack_bounds` returns and takes them.

    Raises:
        ValueError: a pack that does not fit `seq_length`.
    """
    num_packs = len(bounds) - 1
    bounds_P = np.array(bounds)
    first_P, count_P = bounds_P[:-1], bounds_P[1:] - bounds_P[:-1]
    pack_B = np.arange(num_packs).repeat(count_P)
    slot_B = np.arange(bounds[-1]) - first_P.repeat(count_P)
    # Places in all rows laid end to end. After a sample's EOS there is nothing up to the next sample of its row; after
    # the last one there are the row's padding and dummies.
    span_B = tokens_B + 1
    before_B = span_B.cumsum() - span_B
    row_start_B = pack_B * seq_length
    start_B = before_B - before_B[first_P].repeat(count_P) + row_start_B
    end_B = start_B + span_B
    next_B = np.concatenate((start_B[1:], (num_packs * seq_length,)))
    rest_B = next_B - end_B
    slack_P = rest_B[bounds_P[1:] - 1] - (pack_num - count_P)
    if min(slack_P.tolist()) < 0:
        pack = int(slack_P.argmin())
        raise ValueError(
            f"pack {pack} needs {seq_length - int(slack_P[pack])} tokens, but seq_length is {seq_length}: "
            "raise seq_length, or group the samples with create_pack_group"
        )

    # One repeat expands two columns from a table of runs; a float64 fits an int64's place bit for bit.
    run_length = np.array((span_B, rest_B)).T.ravel()
    run_values_BR = np.zeros((2, len(span_B), 2), dtype=np.int64)
    run_values_BR[0] = slot_B[:, None]
    run_values_BR[1, :, 0].view(np.float64)[:] = advantage_B
    sample_index, advantages = run_values_BR.reshape(2, -1).repeat(run_length, axis=1)
    slot_N = np.arange(pack_num)
    if num_packs * pack_num > len(slot_B):
        # A dummy has one token, so the dummy of slot n lies as far from its row's end as n from the last slot.
        last_tokens_PN = sample_index.reshape(num_packs, seq_length)[:, -pack_num:]
        np.copyto(last_tokens_PN, slot_N, where=slot_N >= count_P[:, None])

    ids, mask = place_tokens(rest_B + 1)
    latest_end_N = slot_N + (seq_length - pack_num + 1)
    slots_2PN = np.empty((2, num_packs, pack_num), dtype=np.int64)
    slots_2PN[0] = latest_end_N
    slots_2PN[1] = 1
    slots_2PN[0, pack_B, slot_B] = np.minimum(next_B - row_start_B, latest_end_N[slot_B])
    slots_2PN[1, pack_B, slot_B] = np.add.reduceat(mask, start_B)

    columns = {
        "prompt_completion_ids": ids.reshape(num_packs, seq_length),
        "responses_mask": mask.reshape(num_packs, seq_length),
        "advantages": advantages.view(np.float64).reshape(num_packs, seq_length),
        "actual_sequence_length": slots_2PN[0],
        "sample_index": sample_index.reshape(num_packs, seq_length),
        "sample_valid_length": slots_2PN[1],
    }
    return [{name: column[pack] for name, column in columns.items()} for pack in range(num_packs)]


def _unpadded(pack_list: Sequence[Mapping[str, Any]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token ids and response masks of a pack's samples, cut to their tokens; raises ValueError where that fails."""
    ids = [np.asarray(sample["prompt_completion_ids"]) for sample in pack_list]
    masks = [np.asarray(sample["response_mask"]) for sample in pack_list]
    start = [int(sample["prompt_start_idx"]) for sample in pack_list]
    stop = [int(sample["response_end_index"]) + 1 for sample in pack_list]
    shapes = [array.shape for array in ids]
    if shapes != [array.shape for array in masks] or {len(shape) for shape in shapes} != {1}:
        raise ValueError(
            "prompt_completion_ids and response_mask of a sample must be 1-D and equally long, got shapes "
            f"{shapes} and {[array.shape for array in masks]}"
        )
    if min(start) < 0 or min([size - last for last, (size,) in zip(stop, shapes, strict=True)]) < 0:
        raise ValueError(
            f"prompt_start_idx {start} and response_end_index {[last - 1 for last in stop]} must lie inside "
            f"sequences of {[size for (size,) in shapes]} tokens"
        )
    spans = [slice(first, max(first, last)) for first, last in zip(start, stop, strict=True)]
    return (
        [array[span] for array, span in zip(ids, spans, strict=True)],
        [array[span] for array, span in zip(masks, spans, strict=True)],
    )


def _with_gaps(pieces: list[np.ndarray], gaps: list[int], fill_value: int) -> np.ndarray:
    """The pieces end to end, each followed by its gap of fill values; int64 whatever the pieces are, as the rows."""
    filler = np.full(max(gaps), fill_value)
    parts = [part for piece, gap in zip(pieces, gaps, strict=True) for part in (piece, filler[:gap])]
    return np.concatenate(parts, dtype=np.int64, casting="unsafe")
