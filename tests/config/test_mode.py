"""Two flags of verl's select the mode, and a word means what its writer meant."""

from __future__ import annotations

import pytest

from verl_pg_plugin.config.mode import Mode, is_set, mode_by_flags


@pytest.mark.parametrize(
    ("sharing", "no_padding", "mode"),
    [
        (False, False, Mode.PADDED),
        (False, True, Mode.RMPAD),
        (True, False, Mode.PADDED_GROUPS),
        (True, True, Mode.PACKED),
    ],
)
def test_two_flags_select_the_mode(sharing: bool, no_padding: bool, mode: Mode) -> None:
    assert mode_by_flags(sharing, no_padding) is mode
    assert mode.shares_prefixes == sharing


@pytest.mark.parametrize("word", ["no", "n", "off", "OFF", "false", "none", "0", "", None, False, 0])
def test_words_that_mean_no_are_off(word: object) -> None:
    assert not is_set(word)


@pytest.mark.parametrize("word", ["yes", "on", "true", "1", True, 1])
def test_words_that_mean_yes_are_on(word: object) -> None:
    assert is_set(word)
