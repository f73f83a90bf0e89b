"""An option of verl's users as the matrix runs it: alone, and with every option it meets in the code."""

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_pg_plugin.config import PrefixGrouperEngineConfig, PrefixGrouperOptions
from verl_pg_plugin.config.keys import ACTOR, MODEL


class Place(Enum):
    """Where in the engine an option takes effect; two options that share a place are tested together."""

    CUT = "a mini-batch is cut into micro-batches"
    TOKENS = "the tokens of a forward are padded or spread over ranks"
    HEAD = "outputs are computed from the last hidden states"
    LAYERS = "layers run, and run again in the backward"
    WEIGHTS = "weights are sharded, moved, gathered and updated"


FSDP = f"{ACTOR}.fsdp_config"
ENGINE_FIELDS = {*PrefixGrouperEngineConfig.__dataclass_fields__, *PrefixGrouperOptions.__dataclass_fields__}


def split(override: str) -> list[str]:
    """Several overrides with blanks between them; a field of the batch is none."""
    return re.split(r" (?=[\w.+]+=)", override) if "=" in override else []


@dataclass(frozen=True, eq=False)
class Option:
    name: str  # as ``override``, of its row of docs/support.md
    override: str
    meets: Set[Place] = frozenset()  # where it takes effect
    engine: Mapping[str, Any] = field(default_factory=dict)  # for ``make_engine``, beside those of the override
    model: Mapping[str, Any] = field(default_factory=dict)  # likewise
    batch: Mapping[str, Any] = field(default_factory=dict)  # for ``make_batch``; a tensor becomes a field of the batch
    loss: Mapping[str, Any] = field(default_factory=dict)  # for ``actor_loss``
    num_ranks: int = 1  # processes it needs
    needs_gpu: bool = False
    compiles: bool = False  # torch compiles something, which takes seconds
    masks: bool = False  # it takes some other options out of effect
    splits: bool = False  # it makes split groups, which every case with it must have
    refuses: Set[str] = frozenset()  # names of options that it is rejected with, by name

    def __post_init__(self) -> None:
        engine, model = {}, {}
        for parsed in OverridesParser.create().parse_overrides(split(self.override)):
            section, _, name = parsed.key_or_group.rpartition(".")
            if section in (ACTOR, FSDP, "prefix_grouper") and name in ENGINE_FIELDS - {"strategy"}:
                engine[name] = parsed.value()
            elif section == MODEL:
                model[name] = parsed.value()
        object.__setattr__(self, "engine", {**engine, **self.engine})
        object.__setattr__(self, "model", {**model, **self.model})

    @property
    def is_default(self) -> bool:
        """Whether every case has it on already."""
        return not (self.engine or self.model or self.batch)

    def contradicts(self, other: "Option") -> bool:
        """Whether the two set one thing to different values."""
        sections = (self.engine, other.engine), (self.model, other.model), (self.batch, other.batch)
        return any(str(a[name]) != str(b[name]) for a, b in sections for name in a.keys() & b.keys())


@dataclass(frozen=True, eq=False)
class Case:
    """Options that are on together."""

    options: tuple[Option, ...]

    def __str__(self) -> str:
        return " + ".join(option.name for option in self.options)

    def settings(self, section: str) -> dict[str, Any]:
        """``engine``, ``model``, ``batch`` or ``loss`` of all of them."""
        return {name: value for option in self.options for name, value in getattr(option, section).items()}

    @property
    def num_ranks(self) -> int:
        return max(option.num_ranks for option in self.options)

    @property
    def splits(self) -> bool:
        """Not where temperatures of samples part the groups, which then fit."""
        parted = isinstance(self.settings("batch").get("temperature"), torch.Tensor)
        return any(option.splits for option in self.options) and not parted

    @property
    def is_refused(self) -> bool:
        return any(option.refuses & {other.name for other in self.options} for option in self.options)


def alone(options: Iterable[Option]) -> list[Case]:
    return [Case((option,)) for option in options]


def pairs(options: Iterable[Option], refused: bool = False) -> list[Case]:
    """One case per two options that share a place and can be on together, or could, were they not refused by name."""
    changing = [option for option in options if not option.is_default]
    both = [Case((a, b)) for a, b in combinations(changing, 2) if a.meets & b.meets and not a.contradicts(b)]
    return [case for case in both if case.is_refused == refused]


def covering(cases: list[Case]) -> list[Case]:
    """Few cases of many options in which all of the pairs meet, and nothing takes either of the two out of effect."""
    options = list(dict.fromkeys(option for case in cases for option in case.options))
    missing = {frozenset(case.options): case.options for case in cases}

    def gained(together: tuple[Option, ...]) -> list[frozenset[Option]]:
        masking = {option for option in together if option.masks}
        return [pair for pair in map(frozenset, combinations(together, 2)) if masking <= pair and pair in missing]

    few = []
    while missing:
        together = next(iter(missing.values()))
        for option in options:
            larger = Case((*together, option))
            fits = option not in together and not any(option.contradicts(other) for other in together)
            if fits and not larger.is_refused and len(gained(larger.options)) > len(gained(together)):
                together = larger.options
        few.append(Case(together))
        for pair in gained(together):
            del missing[pair]
    return few
