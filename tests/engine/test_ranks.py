"""What ranks tell each other, and that a block succeeds on every rank or fails on every rank."""

from typing import Any

import pytest

from tests.engine.threads import on_threads
from verl_pg_plugin.engine.ranks import Agreement, RankError


def agree(rank: int, failing: int | None) -> list[str]:
    with Agreement() as ranks:
        if rank == failing:
            raise ZeroDivisionError("here")
        ranks.tell(f"of {rank}")
    return ranks.told


def test_every_rank_knows_what_all_have_told_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_threads(3, lambda rank: agree(rank, None), monkeypatch) == [["of 0", "of 1", "of 2"]] * 3


def test_a_rank_that_fails_raises_its_own_error_and_the_others_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here: Any
    others, here = on_threads(2, lambda rank: agree(rank, 1), monkeypatch)
    assert repr(here) == "ZeroDivisionError('here')"
    assert isinstance(others, RankError)
    assert str(others) == "rank 1: ZeroDivisionError: here"
