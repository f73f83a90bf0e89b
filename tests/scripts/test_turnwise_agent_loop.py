"""Every turn of the agent example is a row that begins with all of the row before it."""

from __future__ import annotations

import asyncio
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cpu.conftest import SCRIPTS

sys.path.insert(0, str(SCRIPTS / "data"))

from turnwise_agent_loop import MAX_TURNS, TurnwiseAgentLoop, checked

PROMPT = [{"role": "user", "content": "3+4="}]


class Loop(TurnwiseAgentLoop):
    """With a server that gives the replies it is told to, and characters for tokens."""

    def __init__(self, replies: list[str], prompt_length: int = 200) -> None:
        self.replies = iter(replies)
        self.rollout_config = SimpleNamespace(prompt_length=prompt_length, response_length=8)
        self.server_manager = self
        self.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids)))

    async def generate(self, **_: Any) -> Any:
        tokens = list(map(ord, next(self.replies)))
        return SimpleNamespace(token_ids=tokens, log_probs=[-0.5] * len(tokens), extra_fields={"global_steps": 1})

    async def ct_build_initial_tokens(self, messages: Any, **_: Any) -> list[int]:
        return list(map(ord, messages[0]["content"]))

    async def ct_merge_assistant_token(self, prompt_ids: list[int], tokens: list[int], mask: Any, **_: Any) -> Any:
        return SimpleNamespace(token_ids=prompt_ids + tokens), mask, None

    async def ct_merge_context_msg(self, before: Any, after: Any, tokens: list[int], mask: Any, **_: Any) -> Any:
        assert after[: len(before)] == before
        return SimpleNamespace(token_ids=tokens + list(map(ord, after[-1]["content"]))), mask, None

    def play(self) -> list[Any]:
        return asyncio.run(self.run({}, raw_prompt=PROMPT, reward_model={"ground_truth": "7"}))


def test_rows_continue_each_other_until_the_answer_is_right() -> None:
    rows = Loop(["5", "x", "7", "never asked"]).play()
    texts = ["".join(map(chr, row.prompt_ids + row.response_ids)) for row in rows]
    assert texts == ["3+4=5", "3+4=5Too small.x", "3+4=5Too small.xNo digits.7"]
    for before, after in pairwise(rows):
        whole = before.prompt_ids + before.response_ids
        assert after.prompt_ids[: len(whole)] == whole
    assert [row.num_turns for row in rows] == [2, 4, 6]
    assert all(len(row.response_mask) == len(row.response_logprobs) == 1 for row in rows)


def test_a_session_ends_after_its_turns_or_where_the_next_prompt_is_too_long() -> None:
    assert len(Loop(["8"] * 9).play()) == MAX_TURNS
    assert len(Loop(["8"] * 9, prompt_length=16).play()) == 2


@pytest.mark.parametrize(("reply", "says"), [("3", "Too small."), ("12", "Too large."), ("", "No digits.")])
def test_the_checker_says_on_which_side_a_reply_lies(reply: str, says: str) -> None:
    assert checked(reply, "7") == says
