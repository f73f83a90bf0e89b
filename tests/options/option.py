"""An option of verl in the matrix: alone, and with every option of the same code."""

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
    """Where in the engine an option takes effect; options of one place are tested together."""

    CUT = "a mini-batch is cut into micro-batches"
    TOKENS = "the tokens of a forward are padded or spread over ranks"
    HEAD = "outputs are computed from the last hidden states"
    LAYERS = "layers run, and run again in the backward"
    WEIGHTS = "weights are sharded, moved, gathered and updated"


FSDP = f"{ACTOR}.fsdp_config"
ENGINE_FIELDS = {*PrefixGrouperEngineConfig.__dataclass_fields__, *PrefixGrouperOptions.__dataclass_fields__}


def split(override: str) -> list[str]:
    """Split overrides at blanks; a batch field gives none."""
    return re.split(r" (?=[\w.+]+=)", override) if "=" in override else []


@dataclass(frozen=True, eq=False)
class Option:
    name: str  # as ``override``, of its row of docs/support.md
    override: str
    meets: Set[Place] = frozenset()  # where it takes effect
    engine: Mapping[str, Any] = field(default_factory=dict)  # for ``make_engine``, in addition to the override
    model: Mapping[str, Any] = field(default_factory=dict)  # likewise
    batch: Mapping[str, Any] = field(default_factory=dict)  # for ``make_batch``; a tensor becomes a field of the batch
    loss: Mapping[str, Any] = field(default_factory=dict)  # for ``actor_loss``
    num_ranks: int = 1  # number of processes
    needs_gpu: bool = False
    compiles: bool = False  # torch compiles, which takes seconds
    masks: bool = False  # it disables some other options
    splits: bool = False  # every case with it must split groups
    refuses: Set[str] = frozenset()  # names of incompatible options

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
        """True if every case includes it."""
        return not (self.engine or self.model or self.batch)

    def contradicts(self, other: "Option") -> bool:
        """True if both options set a field to different values."""
        sections = (self.engine, other.engine), (self.model, other.model), (self.batch, other.batch)
        return any(str(a[name]) != str(b[name]) for a, b in sections for name in a.keys() & b.keys())


@dataclass(frozen=True, eq=False)
class Case:
    """Options of one run."""

    options: tuple[Option, ...]

    def __str__(self) -> str:
        return " + ".join(option.name for option in self.options)

    def settings(self, section: str) -> dict[str, Any]:
        """The merged ``engine``, ``model``, ``batch`` or ``loss`` of all options."""
        return {name: value for option in self.options for name, value in getattr(option, section).items()}

    @property
    def num_ranks(self) -> int:
        return max(option.num_ranks for option in self.options)

    @property
    def splits(self) -> bool:
        """False with a temperature for each sample: then groups are smaller and fit."""
        return any(o.splits for o in self.options) and not isinstance(
            self.settings("batch").get("temperature"), torch.Tensor
        )

    @property
    def is_refused(self) -> bool:
        return any(option.refuses & {other.name for other in self.options} for option in self.options)


def alone(options: Iterable[Option]) -> list[Case]:
    return [Case((option,)) for option in options]


def pairs(options: Iterable[Option], refused: bool = False) -> list[Case]:
    """One case per two options of one place, either all valid pairs or all ``refused`` ones."""
    changing = [option for option in options if not option.is_default]
    both = [Case((a, b)) for a, b in combinations(changing, 2) if a.meets & b.meets and not a.contradicts(b)]
    return [case for case in both if case.is_refused == refused]


def covering(cases: list[Case]) -> list[Case]:
    """Merge pairs into few cases of many options; no option of a case disables one of its pairs."""
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
