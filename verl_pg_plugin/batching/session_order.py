"""What sequences share, from who they belong to and how long they are, where nobody has their tokens at hand.

A trainer's driver knows of each sequence its prompt (uid), its session, its place in the session and two lengths. From
these the trie follows as far as rollouts build it:

- sessions of one prompt share the first row's prompt;
- a row whose prompt is at least as long as all of the row before it continues that row and shares all of it: one row
  per turn, tool output and all;
- a row with a shorter prompt was given an edited context, and shares with its session what its sessions share.

What all prompts begin with, a system prompt, shows in the tokens of a few of them. What is not seen is sharing between
some prompts alone, and how much an edited context kept beyond its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl_pg_plugin.layout.order import IntArray, PrefixOrder


@dataclass(frozen=True)
class BatchRows:
    """What is known about the B sequences of a batch.

    Attributes:
        uids: (B,) sequences with one prompt have one uid.
        sessions, places: (B,) int64, which of a prompt's sessions a row is from, and which of its rows it is.
        prompt_lengths, response_lengths: (B,) int64, tokens.
        common_tokens: that all prompts begin with.
    """

    uids: Sequence[str]
    sessions: IntArray
    places: IntArray
    prompt_lengths: IntArray
    response_lengths: IntArray
    common_tokens: int = 0

    @property
    def lengths(self) -> IntArray:
        """(B,) tokens of each sequence."""
        return self.prompt_lengths + self.response_lengths

    @property
    def groups(self) -> IntArray:
        """(B,) numbers of the uids, in the order in which they come: verl draws uids anew in every run."""
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(uid, len(numbers)) for uid in self.uids], dtype=np.int64)

    def order(self) -> PrefixOrder:
        """What they share, as far as this tells."""
        return order_by_sessions(
            self.groups, self.sessions, self.places, self.prompt_lengths, self.response_lengths, self.common_tokens
        )

    def select(self, rows: Sequence[int] | IntArray) -> BatchRows:
        """Some of the sequences, in the order of ``rows``."""
        places = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            uids=[self.uids[row] for row in places],
            sessions=self.sessions[places],
            places=self.places[places],
            prompt_lengths=self.prompt_lengths[places],
            response_lengths=self.response_lengths[places],
        )


def order_by_sessions(
    group: IntArray,
    session: IntArray,
    place: IntArray,
    prompt_lengths: IntArray,
    response_lengths: IntArray,
    common_tokens: int = 0,
) -> PrefixOrder:
    """B sequences, group after group, in each the sessions with most rows first, in each session by place.

    Args:
        group: (B,) equal values mark sequences of one prompt; groups come in the order of their first sequence.
        session: (B,) equal values within a group mark rows of one session.
        place: (B,) of a row in its session.
        prompt_lengths, response_lengths: (B,) tokens; a sequence has at least two.
        common_tokens: that all prompts begin with.
    """
    lengths = prompt_lengths + response_lengths
    _, first_of_group, group = np.unique(group, return_index=True, return_inverse=True)
    rank_of_group = np.argsort(np.argsort(first_of_group, kind="stable"), kind="stable")[group]
    _, key = np.unique(np.stack([rank_of_group, session]), axis=1, return_inverse=True)
    longest = np.zeros(key.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(longest, key, lengths)
    order = np.lexsort((place, key, -longest[key], rank_of_group))

    prompts, lengths, key, in_group = (values[order] for values in (prompt_lengths, lengths, key, rank_of_group))
    opens_group = np.append(True, in_group[1:] != in_group[:-1])[: len(order)]
    continues = np.append(False, key[1:] == key[:-1])[: len(order)]
    extends = continues & np.append(False, prompts[1:] >= lengths[:-1])[: len(order)]
    common = np.minimum(prompts, prompts[opens_group][np.cumsum(opens_group) - 1])
    num_shared = np.where(extends, np.append(0, lengths[:-1])[: len(order)], common) - 1
    num_shared[opens_group] = max(common_tokens - 1, 0)
    num_shared[:1] = 0
    return PrefixOrder(sequences=order, num_tokens=lengths - 1, num_shared=np.minimum(num_shared, lengths - 1).clip(0))


def common_prefix(prompts: Sequence[IntArray]) -> int:
    """Number of tokens that all of some prompts begin with; 0 for fewer than two prompts, which share nothing."""
    if len(prompts) < 2:
        return 0
    length = min(map(len, prompts))
    differs = np.any([prompt[:length] != prompts[0][:length] for prompt in prompts], axis=0)
    return int(differs.argmax()) if differs.any() else length
