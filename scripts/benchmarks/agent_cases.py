"""Batches of agents, of tree searches and of prompts with one preamble, for ``bench_actor.py``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from verl_pg_plugin.layout.order import IntArray
from verl_pg_plugin.synthetic import Sample, random_group


@dataclass(frozen=True)
class CaseRows:
    """The rows of all ranks as a trainer has them.

    Attributes:
        samples: B rows.
        group, session, place: (B,) prompt of each, its session (numbers of different prompts differ), and its place
            in the session.
    """

    samples: list[Sample]
    group: IntArray
    session: IntArray
    place: IntArray

    @classmethod
    def of(cls, rows: Iterable[tuple[Sample, int, int, int]], world_size: int) -> CaseRows:
        """From sample, group, session and place of each; as many as the ranks can share, the last are dropped."""
        rows = list(rows)
        samples, *numbers = zip(*rows[: len(rows) // world_size * world_size], strict=True)
        return cls(list(samples), *map(np.array, numbers))

    def with_samples(self, samples: list[Sample]) -> CaseRows:
        return replace(self, samples=samples)


class _Named:
    """``NAME:`` and the fields, parted by commas."""

    NAME: ClassVar[str]
    FIELDS: ClassVar[str]
    pictures = None

    @classmethod
    def parse(cls, text: str) -> Any:
        """Read what ``str`` writes.

        Raises:
            argparse.ArgumentTypeError: there are other fields, or one is no positive number.
        """
        numbers = text.removeprefix(f"{cls.NAME}:").split(",")
        if len(numbers) != len(cls.FIELDS.split(",")) or not all(
            number.isdigit() and int(number) for number in numbers
        ):
            raise argparse.ArgumentTypeError(f"{text}: write {cls.NAME}:{cls.FIELDS} in positive numbers")
        return cls(*map(int, numbers))

    def __str__(self) -> str:
        return f"{self.NAME}:{','.join(map(str, astuple(self)))}"  # type: ignore[call-overload]


@dataclass(frozen=True)
class AgentCase(_Named):
    """Sessions with one row per turn: its prompt is the conversation so far, its response the reply of the turn.

    Attributes:
        prompt, reply, tool: tokens of the task, of each reply and of what the tool says to it.
        turns: rows of a session.
        n: sessions of a prompt.
        groups: prompts of a rank.
    """

    NAME = "agent"
    FIELDS = "P,REPLY,TOOL,TURNS,n,groups"

    prompt: int
    reply: int
    tool: int
    turns: int
    n: int
    groups: int

    @property
    def largest_group(self) -> int:
        """Rows of a prompt."""
        return self.n * self.turns

    def rows(self, vocab_size: int, world_size: int) -> CaseRows:
        """All ranks' rows."""
        rng = np.random.default_rng(0)
        rows = []
        for group in range(self.groups * world_size):
            task = rng.integers(vocab_size, size=self.prompt).tolist()
            for session in range(group * self.n, (group + 1) * self.n):
                context = task
                for turn in range(self.turns):
                    reply = rng.integers(vocab_size, size=self.reply).tolist()
                    rows.append((Sample(context, reply), group, session, turn))
                    context = [*context, *reply, *rng.integers(vocab_size, size=self.tool).tolist()]
        return CaseRows.of(rows, world_size)


@dataclass(frozen=True)
class TreeCase(_Named):
    """A search tree with a row for every leaf: its response is the path, whose first steps it shares with others.

    Attributes:
        prompt, step: tokens of the root and of every step behind it.
        branching: steps that are tried behind each.
        depth: steps of a path.
        groups: trees of a rank.
    """

    NAME = "tree"
    FIELDS = "P,STEP,BRANCHING,DEPTH,groups"

    prompt: int
    step: int
    branching: int
    depth: int
    groups: int

    @property
    def largest_group(self) -> int:
        """Leaves of a tree."""
        return self.branching**self.depth

    def rows(self, vocab_size: int, world_size: int) -> CaseRows:
        """All ranks' rows, each a session of its own."""
        rng = np.random.default_rng(0)
        rows: list[tuple[Sample, int, int, int]] = []
        for group in range(self.groups * world_size):
            root = rng.integers(vocab_size, size=self.prompt).tolist()
            paths: list[list[int]] = [[]]
            for _ in range(self.depth):
                paths = [
                    [*path, *rng.integers(vocab_size, size=self.step).tolist()]
                    for path in paths
                    for _ in range(self.branching)
                ]
            rows += [(Sample(root, path), group, len(rows) + leaf, 0) for leaf, path in enumerate(paths)]
        return CaseRows.of(rows, world_size)


@dataclass(frozen=True)
class PreambleCase(_Named):
    """Prompts that all begin with the same examples.

    Attributes:
        preamble, prompt, response: tokens of the examples, of a prompt behind them and of a response.
        n: responses to a prompt.
        groups: prompts of a rank.
    """

    NAME = "preamble"
    FIELDS = "EXAMPLES,P,R,n,groups"

    preamble: int
    prompt: int
    response: int
    n: int
    groups: int

    @property
    def largest_group(self) -> int:
        """Responses to a prompt."""
        return self.n

    def rows(self, vocab_size: int, world_size: int) -> CaseRows:
        """All ranks' rows, each a session of its own."""
        rng = np.random.default_rng(0)
        examples = rng.integers(vocab_size, size=self.preamble).tolist()
        rows: list[tuple[Sample, int, int, int]] = []
        for group in range(self.groups * world_size):
            members = random_group(rng, vocab_size, self.prompt, [self.response] * self.n)
            rows += [
                (replace(member, prompt=[*examples, *member.prompt]), group, len(rows) + number, 0)
                for number, member in enumerate(members)
            ]
        return CaseRows.of(rows, world_size)


NAMED_CASES = {case.NAME: case for case in (AgentCase, TreeCase, PreambleCase)}
