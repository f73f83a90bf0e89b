"""Packing a whole GRPO batch.

Shape suffixes: B samples, T tokens of a padded sample.
"""

import logging

import numpy as np
from numpy.typing import ArrayLike

from verl_pg_plugin.packing.pack_group import pack_bounds
from verl_pg_plugin.packing.packed_rows import fill_rows

logger = logging.getLogger(__name__)


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
    """Strip a batch of its padding and pack it, in order, into rows of `seq_length` tokens.

    A sample runs from the first set position of its prompt mask to the last set position of its response mask.
    Samples whose prompt or response mask is empty are dropped; each of the two reasons is logged as one warning that
    names the samples' indices (a sample for which both hold is named with the empty prompts).

    Args:
        prompt_completion_ids: (bs, seq) integer token ids.
        prompts_mask: (bs, seq) 0/1 or bool, 1 on prompt tokens.
        responses_mask: (bs, seq) 0/1 or bool, 1 on response tokens.
        advantages: bs numbers, of any shape.
        pack_num: most samples a row holds.
        seq_length: tokens in a packed row; may be any size the samples fit.
        pad_token_id: written after every sample, as padding and in dummies (the tokenizer's EOS).

    Returns:
        One dict a packed row, as `pack_grouped_data` returns it.

    Raises:
        ValueError: ragged or unequal shapes, `pack_num < 1`, a response that ends before its prompt starts, or a
            sample that does not fit a row.
    """
    ids_BT = _matrix("prompt_completion_ids", prompt_completion_ids)
    prompt_mask_BT = _matrix("prompts_mask", prompts_mask)
    response_mask_BT = _matrix("responses_mask", responses_mask)
    advantage_B = np.asarray(advantages).reshape(-1)
    if not ids_BT.shape == prompt_mask_BT.shape == response_mask_BT.shape:
        raise ValueError(
            "prompt_completion_ids, prompts_mask and responses_mask must have one shape (bs, seq), got "
            f"{ids_BT.shape}, {prompt_mask_BT.shape} and {response_mask_BT.shape}"
        )
    bs, seq_len = ids_BT.shape
    if len(advantage_B) != bs:
        raise ValueError(f"advantages must hold one number for each of the {bs} samples, got {len(advantage_B)}")
    start_B, has_prompt_B = _first_set(prompt_mask_BT)
    from_end_B, has_response_B = _first_set(response_mask_BT[:, ::-1])
    _warn_dropped("prompts_mask", ~has_prompt_B)
    _warn_dropped("responses_mask", has_prompt_B & ~has_response_B)

    kept_B = has_prompt_B & has_response_B
    tokens_B = np.where(kept_B, seq_len - from_end_B - start_B, 0)
    kept = np.flatnonzero(kept_B)
    bounds = pack_bounds(tokens_B[kept], pack_num, seq_length, index_B=kept)
    if not kept.size:
        return []
    column_T = np.arange(seq_len)
    in_sample_BT = (column_T >= start_B[:, None]) & (column_T < (start_B + tokens_B)[:, None])

    def place_tokens(gap_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Boolean indexing copies whole runs, at about the cost of a memcpy; integer indices would cost a gather.
        run_length = np.array((tokens_B[kept], gap_B)).T.ravel()
        holds_token = (np.arange(run_length.size) % 2 == 0).repeat(run_length)
        ids = np.full(holds_token.size, pad_token_id, dtype=np.int64)
        ids[holds_token] = ids_BT[in_sample_BT]
        mask = np.zeros(holds_token.size, dtype=np.int64)
        mask[holds_token] = response_mask_BT[in_sample_BT]
        return ids, mask

    return fill_rows(tokens_B[kept], advantage_B[kept], place_tokens, bounds, pack_num, seq_length)


def _matrix(name: str, values: ArrayLike) -> np.ndarray:
    try:
        matrix = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is ragged: every sample needs the same length, pad them first") from error
    if matrix.ndim != 2 or matrix.shape[1] == 0:
        raise ValueError(f"{name} must have shape (bs, seq) with seq >= 1, got {matrix.shape}")
    return matrix


def _first_set(mask_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Position of each row's first non-zero (0 where there is none), and whether there is one."""
    set_BT = mask_BT != 0
    first_B = set_BT.argmax(axis=1)
    return first_B, set_BT[np.arange(len(set_BT)), first_B]


def _warn_dropped(name: str, dropped_B: np.ndarray) -> None:
    indices = np.flatnonzero(dropped_B)
    if indices.size:
        logger.warning("dropping samples %s: their %s is all zero", indices.tolist(), name)
