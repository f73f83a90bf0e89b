"""Which consecutive samples share a packed row.

Shape suffixes: B samples, P packs.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

Sample = TypeVar("Sample", bound=Mapping[str, Any])


def create_pack_group(samples: Sequence[Sample], pack_num: int, seq_length: int) -> list[list[Sample]]:
    """Cut a list of samples, in order, into packs that fit one row each.

    A new pack starts when the current one holds `pack_num` samples, or when its samples (each plus one EOS) plus
    one slot for every sample still missing to `pack_num` would exceed `seq_length`.

    Args:
        samples: mappings with integers `prompt_start_idx` and `response_end_index` (both inclusive).
        pack_num: most samples a pack may hold.
        seq_length: tokens in a packed row.

    Returns:
        The packs, each a list of the given mappings (not copies). No samples give no packs.

    Raises:
        ValueError: `pack_num < 1`, a sample without tokens, or one that does not fit a row by itself.
    """
    start_B = np.array([sample["prompt_start_idx"] for sample in samples], dtype=np.int64)
    end_B = np.array([sample["response_end_index"] for sample in samples], dtype=np.int64)
    bounds = pack_bounds(end_B + 1 - start_B, pack_num, seq_length)
    return [list(samples[first:last]) for first, last in pairwise(bounds)]


def pack_bounds(tokens_B: np.ndarray, pack_num: int, seq_length: int, index_B: np.ndarray | None = None) -> list[int]:
    """First sample of every pack, followed by the number of samples: pack `p` is `bounds[p]:bounds[p + 1]`.

    Args:
        tokens_B: int64 tokens of each sample, without the EOS that packing appends.
        pack_num: most samples a pack may hold.
        seq_length: tokens in a packed row.
        index_B: what errors call the samples; by default their places in `tokens_B`.

    Raises:
        ValueError: as `create_pack_group`.
    """
    check_samples_fit(tokens_B.tolist(), pack_num, seq_length, index_B)
    num_samples = len(tokens_B)
    # A pack of samples s..e-1 takes sum(tokens + 1) slots, and its pack_num - (e - s) dummies one each: together
    # sum(tokens) + pack_num. So the last e that fits follows from the running sum alone, for every s at once.
    tokens_before = np.concatenate(([0], np.cumsum(tokens_B)))
    fits_until = np.searchsorted(tokens_before, tokens_before[:-1] + seq_length - pack_num, side="right") - 1
    next_start = np.minimum(fits_until, np.arange(num_samples) + pack_num).tolist()
    bounds = [0]
    while bounds[-1] < num_samples:
        bounds.append(next_start[bounds[-1]])
    return bounds


def check_samples_fit(
    num_tokens: Sequence[int], pack_num: int, seq_length: int, index_B: np.ndarray | None = None
) -> None:
    """Raise ValueError for `pack_num < 1`, samples without tokens, and samples longer than a row can hold.

    Args: as `pack_bounds`, the tokens as Python integers.
    """
    if pack_num < 1:
        raise ValueError(f"pack_num must be at least 1, got {pack_num}")
    if not num_tokens:
        return
    if min(num_tokens) < 1:
        empty = np.flatnonzero(np.less(num_tokens, 1))
        named = empty if index_B is None else index_B[empty]
        raise ValueError(f"samples {named.tolist()} hold no tokens: their responses end before their prompts start")
    longest = max(num_tokens)
    needed = longest + pack_num
    if needed > seq_length:
        place = num_tokens.index(longest)
        raise ValueError(
            f"sample {place if index_B is None else index_B[place]} has {longest} tokens and needs a row of {needed} "
            f"(with its EOS and {pack_num - 1} dummy slots), but seq_length is {seq_length}: "
            f"raise seq_length to at least {needed}, or shorten the sample"
        )
