"""Sessions, places and lengths tell a driver what they share, without a token."""

from collections.abc import Sequence

import numpy as np
import pytest

from verl_pg_plugin.layout.order import PrefixOrder, build_prefix_order
from verl_pg_plugin.mixers import PairCost
from verl_pg_plugin.planning.balance import cost_together, order_by_sessions
from verl_pg_plugin.planning.cost import ModelFlops

FLOPS = ModelFlops(1.4e10, 1.2e9, (PairCost(5.2e5),))


class Rollouts:
    """Rows of sessions with the tokens that the driver does not see."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.columns: list[tuple[int, int, int, int, int]] = []
        self.tokens: list[np.ndarray] = []

    def draw(self, length: int) -> np.ndarray:
        return self.rng.integers(1_000_000, size=length)

    def session(self, group: int, session: int, prompt: np.ndarray, turns: Sequence[tuple[int, int]]) -> None:
        """One row per turn, of (reply, tool output) tokens."""
        context = prompt
        for place, (reply, tool) in enumerate(turns):
            self.row(group, session, place, context, self.draw(reply))
            context = np.concatenate([self.tokens[-1], self.draw(tool)])

    def row(self, group: int, session: int, place: int, prompt: np.ndarray, response: np.ndarray) -> None:
        self.columns.append((group, session, place, len(prompt), len(response)))
        self.tokens.append(np.concatenate([prompt, response]))

    def estimated(self) -> PrefixOrder:
        return order_by_sessions(*np.array(self.columns).T)

    def real(self) -> PrefixOrder:
        offsets = np.append(0, np.cumsum([len(tokens) for tokens in self.tokens]))
        return build_prefix_order(np.concatenate(self.tokens), offsets, classes=np.array(self.columns)[:, 0])

    def price(self, order: PrefixOrder) -> float:
        responses = np.array(self.columns)[:, 4]
        return cost_together(order, responses, FLOPS.segments, np.arange(len(self.tokens)))[0]


def test_sessions_of_a_prompt_and_prompts_of_a_batch_share_what_their_tokens_share() -> None:
    rollouts = Rollouts()
    for group in (3, 1):
        prompt = rollouts.draw(300)
        for session in range(4):
            rollouts.session(group, session, prompt, [(20, 50)] * (1 + session))
    estimated, real = rollouts.estimated(), rollouts.real()
    assert estimated.num_new.sum() == real.num_new.sum()
    assert rollouts.price(estimated) == pytest.approx(rollouts.price(real), rel=1e-3)
    groups = np.array(rollouts.columns)[estimated.sequences, 0]
    assert groups.tolist() == [3] * 10 + [1] * 10, "in the order in which they came"


def test_an_edited_context_shares_what_the_sessions_share() -> None:
    rollouts = Rollouts()
    prompt = rollouts.draw(300)
    rollouts.session(0, 0, prompt, [(20, 500), (20, 500)])
    rollouts.row(0, 0, 2, np.concatenate([prompt, rollouts.draw(100)]), rollouts.draw(20))
    rollouts.row(0, 0, 3, np.concatenate([rollouts.tokens[-1], rollouts.draw(500)]), rollouts.draw(20))
    estimated = rollouts.estimated()
    assert estimated.num_new.sum() == rollouts.real().num_new.sum()
    assert estimated.num_shared.tolist() == [0, 319, 299, 419]


def test_filler_rows_cost_one_prompt_for_all_of_them() -> None:
    """verl fills mini-batches with copies of one sequence of 127 + 1 tokens, each a session of its own."""
    filler = order_by_sessions(
        np.zeros(50, dtype=np.int64), np.arange(50), np.zeros(50, dtype=np.int64), np.full(50, 127), np.ones(50, int)
    )
    assert filler.num_new.sum() == 127 + 49
