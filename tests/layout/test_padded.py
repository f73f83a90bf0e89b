"""Lines of upstream's padded groups, written out: a prompt once, then every response with the prompt's last token."""

import numpy as np

from verl_pg_plugin.layout import PaddedLayout, build_padded_layout


def laid_out(*samples: tuple[tuple[int, ...], tuple[int, ...]]) -> PaddedLayout:
    whole = [(*prompt, *response) for prompt, response in samples]
    offsets = np.cumsum([0, *map(len, whole)])
    return build_padded_layout(np.concatenate(whole), offsets, np.array([len(prompt) for prompt, _ in samples]))


def test_a_group_is_a_line_wherever_its_sequences_stand() -> None:
    layout = laid_out(((1, 2, 3), (7, 8)), ((4, 5), (6,)), ((1, 2, 3), (9,)))
    assert layout.group_info == [[2, 2, 1], [1, 1]]
    assert layout.input_ids.tolist() == [[1, 2, 3, 7, 3], [4, 5, 0, 0, 0]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 2], [0, 1, 0, 0, 0]]
    assert layout.labels.tolist() == [[2, 3, 7, 8, 9], [5, 6, 0, 0, 0]]
    assert layout.head_index.tolist() == [2, 3, 4, 6]
    assert layout.head_sequence.tolist() == [0, 0, 2, 1]
    assert layout.response_index.tolist() == [2, 3, 10, 6]
    assert layout.response_head.tolist() == [0, 1, 2, 3]
    assert (layout.num_tokens, len(layout.group_info), layout.num_logical_tokens) == (10, 2, 12)
    assert [x.tolist() for x in layout.segments] == [[0, 2, 2, 0, 1], [2, 2, 1, 1, 1]], "responses see their prefix"


def test_prompts_that_differ_in_a_single_token_are_lines_of_their_own() -> None:
    layout = laid_out(((1, 2, 3), (7,)), ((1, 4, 3), (7,)), ((5, 2, 3), (7,)))
    assert len(layout.group_info) == 3
    assert layout.input_ids.tolist() == [[1, 2, 3], [1, 4, 3], [5, 2, 3]]
