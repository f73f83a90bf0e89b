"""Batches that training produces, with their layout written out."""

import numpy as np
import pytest

from tests.layout.tries import batch_of, row_keys, segment_tokens
from verl_pg_plugin.layout import build_packed_layout, build_prefix_order

PROMPT = (10, 11, 12, 13)


def test_a_grpo_group_is_its_prompt_once_and_one_segment_per_response_that_repeats_the_last_prompt_token() -> None:
    layout = batch_of((PROMPT, (1, 2, 3)), (PROMPT, (4,)), (PROMPT, (5, 6))).layout()
    assert layout.input_ids.tolist() == [10, 11, 12, 13, 1, 2, 13, 13, 5]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 3, 3, 4]
    assert layout.labels.tolist() == [11, 12, 13, 1, 2, 3, 4, 5, 6]
    assert layout.segment_parent.tolist() == [-1, 0, 0, 0]
    assert layout.segment_start.tolist() == [0, 3, 3, 3]
    assert layout.cu_seqlens_q.tolist() == [0, 3, 6, 7, 9]
    assert layout.cu_seqlens_k.tolist() == [0, 3, 9, 13, 18]
    assert layout.kv_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 0, 1, 2, 7, 8]
    assert layout.head_index.tolist() == [3, 4, 5, 6, 7, 8]
    assert layout.response_index.tolist() == [3, 4, 5, 10, 15, 16]
    assert layout.response_head.tolist() == [0, 1, 2, 3, 4, 5]
    assert (layout.num_tokens, layout.num_logical_tokens, layout.num_groups) == (9, 18, 1)


def test_prompt_rows_skip_the_vocabulary_even_when_the_prompt_is_much_longer_than_the_response() -> None:
    layout = batch_of((range(5000), (1, 2)), (range(5000), (3,))).layout()
    assert layout.num_tokens == 4999 + 2 + 1
    assert len(layout.head_index) == 3


def test_a_multi_turn_tree_shares_at_every_depth() -> None:
    system, turn = (1, 2, 3), (4, 5)
    a, b, c = (*system, *turn, 6), (*system, *turn, 7), (*system, 8)
    layout = batch_of((a, (9, 9)), (a, (8, 8)), (b, (9,)), (c, (9,))).layout()
    # system | turn, a, responses of a | b | c, each one row before the tokens part
    assert segment_tokens(layout) == {
        (0, (1, 2)): 1,
        (2, (3, 4)): 1,
        (4, (5,)): 1,
        (5, (6, 9)): 1,
        (5, (6, 8)): 1,
        (4, (5, 7)): 1,
        (2, (3, 8)): 1,
    }


def test_a_session_with_a_row_per_turn_is_one_segment_however_many_turns_it_has() -> None:
    """A segment for each turn would gather the context of every turn again, as many keys as stock verl has tokens."""
    prompt, turns = tuple(range(100, 120)), 6
    rows = []
    for session in (1, 2):
        context = prompt
        for turn in range(turns):
            reply = (1000 * session + turn,) * 2
            rows.append((context, reply))
            context = (*context, *reply, 50 + turn)
    layout = batch_of(*rows).layout()
    own = 1 + (turns - 1) * 3 + 2 - 1
    assert layout.segment_parent.tolist() == [-1, 0, 0]
    assert np.diff(layout.cu_seqlens_q).tolist() == [19, own, own]
    assert len(layout.kv_index) == 19 + 2 * (19 + own)
    assert len(layout.head_index) == 2 * turns * 2


def test_the_same_prompt_is_shared_wherever_it_stands_in_the_batch() -> None:
    """Balancing over ranks reorders single samples; the same question may also come under two uids."""
    other = (20, 21, 22)
    layout = batch_of((PROMPT, (1,)), (other, (2,)), (PROMPT, (3,)), (other, (4,)), (PROMPT, (5,))).layout()
    assert layout.num_tokens == 3 + 3 + 2 + 2
    assert layout.num_groups == 2


def test_different_prompts_under_one_uid_are_not_merged() -> None:
    layout = batch_of(((1, 2, 3), (4, 5)), ((9, 2, 3), (4, 5))).layout()
    assert layout.num_tokens == 8
    assert layout.num_groups == 2


def test_pad_eos_and_zero_are_tokens_like_any_other() -> None:
    """A layout that guessed padding from ids would lose a genuine eos, token 0 or pad inside a prompt."""
    pad = eos = 0
    batch = batch_of(((pad, pad, 5, eos, 6), (eos,)), ((pad, 5, eos, 6), (eos, pad)), ((5, eos, 6), (eos,)))
    layout = batch.layout()
    assert layout.num_tokens == 5 + 5 + 3
    assert set(row_keys(layout)) == {key for _, key in batch.rows()}


def test_a_response_of_one_token_has_a_row_and_its_last_token_has_none() -> None:
    layout = batch_of((PROMPT, (1,))).layout()
    assert layout.input_ids.tolist() == list(PROMPT)
    assert layout.labels.tolist() == [11, 12, 13, 1]
    assert layout.head_index.tolist() == [3]


def test_labels_never_roll_into_the_next_sequence() -> None:
    layout = batch_of(((1, 2), (3,)), ((4, 5), (6,))).layout()
    assert (3, 4) not in zip(layout.input_ids.tolist(), layout.labels.tolist(), strict=True)
    assert 3 not in layout.input_ids.tolist()


def test_identical_responses_are_one_segment_and_each_reads_its_log_probs() -> None:
    layout = batch_of(*[(PROMPT, (1, 2))] * 4).layout()
    assert layout.num_tokens == 5
    assert segment_tokens(layout) == {(0, (10, 11, 12, 13, 1)): 1}
    assert sorted(layout.response_index.tolist()) == [3, 4, 9, 10, 15, 16, 21, 22]
    assert sorted(layout.response_head.tolist()) == [0] * 4 + [1] * 4


def test_a_batch_that_shares_nothing_is_ordinary_remove_padding() -> None:
    layout = batch_of(((1, 2, 3), (4,)), ((5, 6), (7, 8, 9)), ((10,), (11,))).layout()
    assert layout.segment_parent.tolist() == [-1, -1, -1]
    assert layout.cu_seqlens_q.tolist() == layout.cu_seqlens_k.tolist() == [0, 3, 7, 8]
    assert layout.kv_index.tolist() == list(range(8))


def test_single_token_prompts_share_no_row_unless_the_first_response_token_agrees() -> None:
    layout = batch_of(((5,), (1, 2)), ((5,), (3,)), ((5,), (1, 4))).layout()
    assert sorted(row_keys(layout)) == [(5, 1), (5, 1, 2), (5, 1, 4), (5, 3)]
    assert len(layout.head_index) == 4


def test_a_response_that_another_prompt_contains_keeps_its_head_rows() -> None:
    """Multi-turn: the first turn's response is part of the second turn's prompt."""
    layout = batch_of(((1, 2), (3, 4)), ((1, 2, 3, 4, 5), (6,))).layout()
    assert layout.num_tokens == 5
    assert layout.head_index.tolist() == [1, 2, 4]
    assert layout.segment_parent.tolist() == [-1]


def turns(count: int, length: int = 3) -> list[tuple[range, range]]:
    """Prompts of ever more turns, and the response to each."""
    return [
        (range(2 * length * k + length), range(2 * length * k + length, 2 * length * (k + 1))) for k in range(count)
    ]


def test_turns_that_only_continue_one_another_are_one_segment_and_copy_no_key() -> None:
    """Each turn a sequence of its own, as agent loops hand them in: gathered, 200 turns would copy 101 keys per row."""
    layout = batch_of(*turns(200)).layout()
    assert layout.segment_parent.tolist() == [-1]
    assert layout.kv_index.tolist() == list(range(layout.num_tokens)) == layout.position_ids.tolist()
    assert (layout.num_tokens, layout.num_gathered_kv) == (200 * 6 - 1, 0)
    assert layout.shares_tokens


def test_a_branch_in_the_middle_of_the_turns_cuts_them_there_alone() -> None:
    layout = batch_of(*turns(4), (range(9), (99, 98))).layout()
    # two turns and the third prompt less its last token | the rest | the other response
    assert layout.segment_parent.tolist() == [-1, 0, 0]
    assert layout.segment_start.tolist() == [0, 8, 8]


def test_filler_rows_are_laid_out_like_any_sequence() -> None:
    filler = ((0,), (0,))
    layout = batch_of((PROMPT, (1, 2)), filler, filler).layout()
    assert layout.num_tokens == 5 + 1
    assert layout.num_groups == 2


@pytest.mark.parametrize(
    ("prompt_lengths", "message"),
    [([2, 0], "sequence 1 has an empty prompt"), ([2, 3], "sequence 1 has an empty response")],
)
def test_empty_prompts_and_responses_are_refused_by_name(prompt_lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_packed_layout(np.arange(6), np.array([0, 3, 6]), np.array(prompt_lengths))


@pytest.mark.parametrize("token", [-100, -1, 2**32])
def test_ids_that_are_no_tokens_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=r"token ids must lie in \[0, 2\*\*32\), got"):
        build_packed_layout(np.array([1, 2, token]), np.array([0, 3]), np.array([1]))


def test_a_sequence_of_one_token_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sequence 1 has fewer than two tokens"):
        build_prefix_order(np.array([1, 2, 3]), np.array([0, 2, 3]))
