"""Batches of groups, agents and tree searches, and their FLOPs, for ``bench_actor.py``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from benchmarks.batches import Sample, random_group
from benchmarks.images import PromptImages
from verl_pg_plugin.layout import IntArray, build_packed_layout
from verl_pg_plugin.planning.balance import balance_groups, order_by_sessions
from verl_pg_plugin.planning.cost import ModelFlops

PHASES = ("old_log_prob", "ref", "update_actor", "distill", "sft")


@dataclass(frozen=True)
class CaseSamples:
    """The B samples of all ranks."""

    samples: list[Sample]
    group: IntArray  # (B,) prompt
    session: IntArray  # (B,) session, distinct between prompts
    place: IntArray  # (B,) index in the session


Member: TypeAlias = tuple[Sample, int, int]
"""A sample, its session within the group and its index in the session."""


class _Groups:
    """Base of cases, written ``NAME:`` and the fields; they define ``largest_group`` and ``members`` of a group."""

    NAME: ClassVar[str]
    images: PromptImages | None = None

    @classmethod
    def parse(cls, text: str) -> Any:
        """Parse the output of ``str``; ArgumentTypeError for other fields or numbers below 1."""
        names = [field.name for field in fields(cls)]
        pattern = ",".join("([0-9]+(?:-[0-9]+)?)" if name == "n" else "([0-9]+)" for name in names)
        match = re.fullmatch(f"{cls.NAME}:{pattern}", text)
        if not match or not all(map(int, re.findall("[0-9]+", text))):
            raise argparse.ArgumentTypeError(f"{text}: write {cls.NAME}:{','.join(names)} in positive numbers")
        values = zip(names, match.groups(), strict=True)
        return cls(**{name: value if name == "n" else int(value) for name, value in values})

    def __str__(self) -> str:
        return f"{self.NAME}:{','.join(map(str, astuple(self)))}"  # type: ignore[call-overload]

    def rows(self, vocab_size: int, world_size: int) -> CaseSamples:
        """Return all ranks' samples, without the remainder that ranks cannot share equally."""
        rng = np.random.default_rng(0)
        rows = [
            (sample, group, group * self.largest_group + session, place)
            for group in range(self.groups * world_size)
            for sample, session, place in self.members(vocab_size, rng)
        ]
        samples, *numbers = zip(*rows[: len(rows) // world_size * world_size], strict=True)
        return CaseSamples(list(samples), *map(np.array, numbers))


def bounds(n: str) -> tuple[int, int]:
    """Return the fewest and the most responses or sessions of a prompt: ``8``, or ``4-16`` for a uniform draw."""
    numbers = [int(number) for number in n.split("-")]
    return numbers[0], numbers[-1]


@dataclass(frozen=True)
class Case(_Groups):
    """GRPO groups, with images in the prompt or without."""

    prompt: int  # tokens
    response: str  # tokens, or ``ln:MEAN`` for log-normal lengths
    n: str  # responses per prompt, see ``bounds``
    groups: int  # prompts per rank
    images: PromptImages | None = None  # in each prompt

    @classmethod
    def parse(cls, text: str) -> Case:
        prompt, response, n, groups = text.split(",")
        tokens, _, images = prompt.partition("+")
        return cls(int(tokens), response, n, int(groups), PromptImages.parse(images))

    def __str__(self) -> str:
        images = f"+{self.images}" if self.images else ""
        return f"{self.prompt}{images},{self.response},{self.n},{self.groups}"

    @property
    def largest_group(self) -> int:
        return bounds(self.n)[1]

    def members(self, vocab_size: int, rng: np.random.Generator) -> Iterator[Member]:
        lengths = [self._response_length(rng) for _ in range(rng.integers(*bounds(self.n), endpoint=True))]
        for session, sample in enumerate(random_group(rng, vocab_size, self.prompt, lengths)):
            yield sample, session, 0

    def _response_length(self, rng: np.random.Generator) -> int:
        if not self.response.startswith("ln:"):
            return int(self.response)
        mean = float(self.response[3:])
        return int(np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8), 1, 8 * mean))


@dataclass(frozen=True)
class AgentCase(_Groups):
    """Sessions with a sample per turn, whose prompt is the conversation so far and whose response is the reply."""

    NAME = "agent"

    prompt: int  # tokens of the task
    reply: int  # tokens
    tool: int  # tokens of the tool's result after each reply
    turns: int  # samples of a session
    n: str  # sessions of a prompt, see ``bounds``
    groups: int  # prompts per rank

    @property
    def largest_group(self) -> int:
        return bounds(self.n)[1] * self.turns

    def members(self, vocab_size: int, rng: np.random.Generator) -> Iterator[Member]:
        task = rng.integers(vocab_size, size=self.prompt).tolist()
        for session in range(rng.integers(*bounds(self.n), endpoint=True)):
            context = task
            for turn in range(self.turns):
                reply = rng.integers(vocab_size, size=self.reply).tolist()
                yield Sample(context, reply), session, turn
                context = [*context, *reply, *rng.integers(vocab_size, size=self.tool).tolist()]


@dataclass(frozen=True)
class TreeCase(_Groups):
    """A search tree with a sample for every leaf, whose response is the path from the root."""

    NAME = "tree"

    prompt: int  # tokens of the root
    step: int  # tokens of every other node
    branching: int  # children of a node
    depth: int  # steps of a path
    groups: int  # trees per rank

    @property
    def largest_group(self) -> int:
        return self.branching**self.depth

    def members(self, vocab_size: int, rng: np.random.Generator) -> Iterator[Member]:
        root = rng.integers(vocab_size, size=self.prompt).tolist()
        paths: list[list[int]] = [[]]
        for _ in range(self.depth):
            parents = [path for path in paths for _ in range(self.branching)]
            paths = [[*path, *rng.integers(vocab_size, size=self.step).tolist()] for path in parents]
        for leaf, path in enumerate(paths):
            yield Sample(root, path), leaf, 0


NAMED_CASES = {case.NAME: case for case in (AgentCase, TreeCase)}
AnyCase: TypeAlias = Case | AgentCase | TreeCase


def parse_case(text: str) -> AnyCase:
    """Parse ``P,R,n,groups`` or a named case such as ``agent:...``."""
    name, colon, _ = text.partition(":")
    if not colon or "," in name:  # 4096,ln:1024,4,1 has a colon too
        return Case.parse(text)
    if name not in NAMED_CASES:
        raise argparse.ArgumentTypeError(f"{text}: named cases are {', '.join(NAMED_CASES)}")
    case: AnyCase = NAMED_CASES[name].parse(text)
    return case


def samples_of_ranks(rows: CaseSamples, stock: bool, flops: ModelFlops, world_size: int) -> list[list[int]]:
    """Return the samples of each rank by the trainer's balance: verl's for stock paths, else ours."""
    if world_size == 1:
        return [list(range(len(rows.samples)))]
    prompts = np.array([len(sample.prompt) for sample in rows.samples])
    responses = np.array([len(sample.response) for sample in rows.samples])
    if stock:
        workload = calculate_workload(torch.from_numpy(prompts + responses)).tolist()
        return get_seqlen_balanced_partitions(workload, world_size, equal_size=True)
    prefix_order = order_by_sessions(rows.group, rows.session, rows.place, prompts, responses)
    order = balance_groups(prefix_order, rows.group, responses, flops.segments, world_size).order
    return [part.tolist() for part in np.split(order, world_size)]


def batch_of_phase(batch: TensorDict, phase: str, top_k: int, vocab_size: int) -> TensorDict:
    """Return the engine's batch of a phase, given that of ``update_actor``.

    In ``distill`` a random teacher gives ``top_k`` distinct tokens a position, with a total probability of 82%.
    """
    offsets = batch["input_ids"].offsets()
    if phase == "distill":
        rng, size = np.random.default_rng(0), (int(offsets[-1]), top_k)
        ids = (rng.integers(vocab_size, size=(size[0], 1)) + rng.permutation(vocab_size)[:top_k]) % vocab_size
        log_probs = torch.from_numpy(rng.standard_normal(size, dtype=np.float32)).log_softmax(-1) - 0.2
        batch = batch.copy()
        for name, values in (("teacher_ids", torch.from_numpy(ids)), ("teacher_logprobs", log_probs)):
            batch[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
        tu.assign_non_tensor(batch, distillation_use_topk=True, distillation_only=True)
    if phase == "sft":
        prompts, lengths = batch["prompts"].offsets().diff().tolist(), offsets.diff().tolist()
        masks = [torch.arange(length) >= prompt for prompt, length in zip(prompts, lengths, strict=True)]
        loss_mask = torch.nested.nested_tensor_from_jagged(torch.cat(masks).long(), offsets)
        batch = batch.exclude("old_log_probs", "ref_log_prob", "advantages", "response_mask", "prompts", "responses")
        batch["loss_mask"] = loss_mask
    return batch


@dataclass(frozen=True)
class Work:
    """FLOPs of one pass of the body and of the head on each rank, unshared and packed; tokens of all ranks."""

    alone: list[tuple[float, float]]
    packed: list[tuple[float, float]]
    total_tokens: int
    computed_tokens: int

    @classmethod
    def of(
        cls, ranks: list[list[Sample]], flops: ModelFlops, encoders: Sequence[tuple[float, float]] | None = None
    ) -> Work:
        """Count the work of each rank's samples.

        Args:
            encoders: forward FLOPs of the vision encoder on each rank, unshared and packed.
        """
        alone, packed, tokens = [], [], []
        for samples, (encoder_alone, encoder_packed) in zip(ranks, encoders or [(0.0, 0.0)] * len(ranks), strict=True):
            lengths = np.array([len(sample.prompt) + len(sample.response) for sample in samples])
            head = flops.per_label * float(lengths.sum())
            alone.append((float(flops.alone(lengths).sum()) - head + encoder_alone, head))
            layout = build_packed_layout(
                np.concatenate([[*sample.prompt, *sample.response] for sample in samples]),
                np.append(0, np.cumsum(lengths)),
                np.array([len(sample.prompt) for sample in samples]),
            )
            packed.append((flops.without_head(layout) + encoder_packed, flops.per_label * len(layout.head_index)))
            tokens.append((int(lengths.sum()), layout.num_tokens))
        return cls(alone, packed, *map(sum, zip(*tokens, strict=True)))

    def flops(self, phase: str, packed: bool) -> list[float]:
        """Return each rank's FLOPs; training is four passes of the body (with checkpointing) and three of the head."""
        of_body, of_head = (1, 1) if phase in ("old_log_prob", "ref") else (4, 3)
        return [of_body * body + of_head * head for body, head in (self.packed if packed else self.alone)]
