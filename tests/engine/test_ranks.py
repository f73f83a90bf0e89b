"""A step succeeds on every rank or fails on every rank: what each tells the others, and does with what it is told."""

from typing import Any

import pytest

from verl_pg_plugin.engine import ranks
from verl_pg_plugin.engine.ranks import RankError, gather_on_every_rank, on_every_rank


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this rank tells a second one, which answers that all is well and its result is "theirs"."""
    told: list[Any] = []

    def over_ranks(value: Any, group: Any) -> list[Any]:
        told.append(value)
        return [value, (None, "theirs")]

    monkeypatch.setattr(ranks, "over_ranks", over_ranks)
    return told


def fail() -> None:
    raise ZeroDivisionError("here")


def test_a_rank_that_fails_tells_the_others_before_it_raises(told: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError, match="here"):
        on_every_rank(fail, None)
    assert told == [("ZeroDivisionError: here", None)]


def test_results_of_all_ranks_come_in_their_order(told: list[Any]) -> None:
    assert gather_on_every_rank(lambda: "mine", None) == ["mine", "theirs"]
    assert told == [(None, "mine")]
    assert on_every_rank(lambda: "mine", None) == "mine"
    assert told[-1] == (None, None), "a plan need not travel"


def test_a_failure_elsewhere_ends_the_step_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "over_ranks", lambda value, group: [value, ("ValueError: there", None)])
    with pytest.raises(RankError, match=r"^rank 1: ValueError: there$"):
        on_every_rank(lambda: "mine", None)
