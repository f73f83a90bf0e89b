"""Ranks meet in front of every forward and backward, and an error is told where others come to hear of it, once."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import actor_loss, clone, group, make_engine
from verl_pg_plugin.engine import shared_prefix_engine
from verl_pg_plugin.engine.batch.row_selection import RowSelector
from verl_pg_plugin.engine.ranks import RankError
from verl_pg_plugin.engine.steps import meetings
from verl_pg_plugin.engine.steps.meetings import Meetings
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

BATCH = make_batch([*group(9, [4, 6, 3], 1), *group(7, [5, 2], 2), *group(12, [3, 3], 3)], max_token_len_per_gpu=24)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("here")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What this rank tells in each meeting: the name of an error, or None."""
    gather, told = meetings.gather_on_every_rank, []

    def recorded(step: Callable[[], Any], ranks: Any) -> list[Any]:
        told.append(None)
        try:
            return gather(step, ranks)
        except Exception as error:
            told[-1] = type(error).__name__
            raise

    monkeypatch.setattr(meetings, "gather_on_every_rank", recorded)
    return told


def test_an_error_outside_of_the_model_is_told_once_and_raised(told: list[str | None]) -> None:
    meeting = Meetings(None)
    meeting.before_collectives()
    meeting.after_collectives()
    with pytest.raises(ZeroDivisionError, match="here"), meeting.telling():
        fail()
    assert told == [None, "ZeroDivisionError"]


def test_an_error_inside_of_the_model_is_told_to_nobody(told: list[str | None]) -> None:
    """The others are in the model's collectives, and would take what they hear for another's weights."""
    meeting = Meetings(None)
    meeting.before_collectives()
    with pytest.raises(ZeroDivisionError, match="here"), meeting.telling():
        fail()
    assert told == [None]


def test_what_is_heard_in_a_meeting_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def heard(*args: Any) -> Any:
        calls.append(1)
        raise RankError("rank 1: ValueError: there")

    monkeypatch.setattr(meetings, "gather_on_every_rank", heard)
    meeting = Meetings(None)
    meeting.after_collectives()
    with pytest.raises(RankError, match="there"), meeting.telling():
        meeting.gather(lambda: None)
    assert len(calls) == 1


def test_an_engine_inside_of_a_loss_settles_its_errors_for_the_one_around_it(told: list[str | None]) -> None:
    """Where the inner one's model failed, the others are in its collectives, and not on their way to the outer."""
    outer, inner = Meetings(None), Meetings(None)
    inner.before_collectives()
    with pytest.raises(ZeroDivisionError, match="here"), outer.telling(), inner.telling():
        fail()
    assert told == [None]


@pytest.mark.parametrize("forward_only", [True, False])
def test_ranks_meet_in_front_of_every_forward_and_backward(
    qwen3: str, told: list[str | None], forward_only: bool
) -> None:
    engine = make_engine(qwen3, packed=True, engine={"carry": "never"})
    with engine.eval_mode() if forward_only else engine.train_mode():
        output = engine.forward_backward_batch(clone(BATCH), None if forward_only else actor_loss(), forward_only)
    micro_batches = len(output["loss"])
    assert micro_batches > 1
    assert told == [None] * (micro_batches * (1 if forward_only else 2) + 1), "and at the end"


@pytest.mark.parametrize("fails", [(RowSelector, "select"), (shared_prefix_engine, "on_device")], ids=lambda at: at[1])
def test_an_error_behind_a_backward_is_told(
    qwen3: str, told: list[str | None], monkeypatch: pytest.MonkeyPatch, fails: tuple[Any, str]
) -> None:
    """It lies in front of the next forward, where the others wait."""
    engine, step, calls = make_engine(qwen3, packed=True, engine={"carry": "never"}), getattr(*fails), []

    def second_fails(*args: Any) -> Any:
        calls.append(1)
        return step(*args) if len(calls) == 1 else fail()

    monkeypatch.setattr(*fails, second_fails)
    with pytest.raises(ZeroDivisionError), engine.train_mode():
        engine.forward_backward_batch(clone(BATCH), actor_loss())
    assert told == [None, None, "ZeroDivisionError"]


def test_an_error_behind_the_last_backward_is_told(qwen3: str, told: list[str | None]) -> None:
    """verl joins the metrics of all micro-batches there, and the others have gone on to the end of the mini-batch."""

    def loss(**kwargs: Any) -> Any:
        return actor_loss()(**kwargs)[0], None

    engine = make_engine(qwen3, packed=True, engine={"carry": "never"})
    with pytest.raises((TypeError, AttributeError)) as caught, engine.train_mode():
        engine.forward_backward_batch(clone(BATCH), loss)
    assert told[-1] == type(caught.value).__name__
    assert not any(told[:-1])
