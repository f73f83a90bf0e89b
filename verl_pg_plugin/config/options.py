"""The section ``prefix_grouper`` of the trainer's config, and the values that its options take."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_pg_plugin.attention.kernels import ATTENTION_KERNELS
from verl_pg_plugin.config.keys import OPTIONS
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.planning.activation_level import Level


@dataclass(frozen=True)
class PrefixGrouperOptions:
    """The section ``prefix_grouper`` of the trainer's config; every engine gets the same.

    Args:
        attention_kernel: kernel of packed mode. auto takes the fastest that is installed and fits the model.
        activations: what decoder layers keep for their backward where gradient checkpointing is on, and where it waits.
            all: everything, nothing is computed again. attention: their inputs, and the attention kernel's output and
            log-sum-exp. attention_on_host: the same in pinned memory of the host. inputs: their inputs alone, so that
            the backward runs attention a second time. inputs_on_host: the same on the host. auto takes for each
            micro-batch the first of attention, attention_on_host and inputs_on_host that fits. Gradients are alike to
            the bit, unless the level changes how a group is split.
        compile_layers: ``torch.compile`` every decoder layer, around attention: auto does so on a GPU for types that
            ran compiled on one (``config.compile``), True wherever it can work.
        logits_chunk_size: tokens whose logits the head of packed mode holds at once, or up to twice as many uncut; 0
            for all of them.
        prefix_cache: auto lets the chunks of a split group read their prefix from a cache where that is cheaper; off
            computes it again in each.
        rollout: auto routes the samples of a prompt to one server, lets vLLM read a shared prompt once for each step of
            decode, and looks for finished responses every 0.1 s, each where it pays; off changes nothing in rollouts.
        verify: recompute two samples of live micro-batches alone, compare, and end the run where they differ: in the
            first micro-batch, in every n-th (every_100), or in none (off). auto does so in the first mini-batch of each
            kind, old log-probs and updates, where no test covers the model's class or a switch of its config.
        verify_tolerance: largest error per token, relative to its value where that exceeds 1; null for one that is
            measured in the run.

    Raises:
        ValueError: for values of another type or outside these; one message names them all.
    """

    attention_kernel: str = "auto"
    activations: str = "auto"
    compile_layers: bool | str = "auto"
    logits_chunk_size: int = 2048
    prefix_cache: str = "auto"
    rollout: str = "auto"
    verify: str = "auto"
    verify_tolerance: float | None = None

    def __post_init__(self) -> None:
        if wrong := list(option_issues(vars(self))):
            raise ValueError("; ".join(f"{issue.setting} {issue.why}; set {issue.fix}" for issue in wrong))

    @property
    def verify_period(self) -> int | None:
        """Micro-batches from one that is verified to the next; 0 for the first alone, None for none."""
        every = re.fullmatch(_EVERY, self.verify)
        return int(every[1]) if every else {"first": 0}.get(self.verify)


OPTION_NAMES = tuple(option.name for option in fields(PrefixGrouperOptions))

_EVERY = r"every_([1-9]\d*)"

_WORDS: dict[str, tuple[str, ...]] = {
    "attention_kernel": ATTENTION_KERNELS,
    "activations": ("auto", *(level.value for level in Level)),
    "prefix_cache": ("auto", "off"),
    "rollout": ("auto", "off"),
}
"""Options that take one of these."""
_RENAMED = {"carry": "prefix_cache"}


def added(override: str) -> str:
    """An override of an option with ``++``: Hydra asks for a ``+`` or for none by whether there is such an option."""
    return re.sub(rf"^\+*(?={OPTIONS}\.)", "++", override)


def option_issues(options: Mapping[str, Any], section: str = f"++{OPTIONS}") -> Iterator[Issue]:
    """Options of a section, values by name, that there are not, and values that an option does not take."""
    for name, value in options.items():
        setting = f"{section}.{name}={value}"
        if name in OPTION_NAMES:
            if fault := _fault(name, value):
                why, taken = fault
                yield Issue(setting, why, f"{section}.{name}={taken}")
        elif name != "_target_":
            close = [_RENAMED[name]] if name in _RENAMED else difflib.get_close_matches(name, OPTION_NAMES, n=1)
            why = f"there is no such option; there are {', '.join(OPTION_NAMES)}"
            fix = f"did you mean {section}.{close[0]}={value}?" if close else "remove it"
            yield Issue(setting, why, fix)


def _fault(name: str, value: Any) -> tuple[str, str] | None:
    """Why an option does not take a value, and what it takes."""
    if name in _WORDS:
        words = _WORDS[name]
        return None if value in words else (f"is unknown; the values are {', '.join(words)}", words[0])
    if name == "compile_layers" and not (value == "auto" or isinstance(value, bool)):
        return "is neither auto nor a boolean; the values are auto, True and False without quotes", "auto"
    if name == "logits_chunk_size" and not (type(value) is int and value >= 0):
        return "is not an integer of at least 0", "<integer of at least 0>"
    if name == "verify" and not (value in ("auto", "off", "first") or re.fullmatch(_EVERY, str(value))):
        return "is unknown; the values are auto, off, first and every_<number>", "auto, off, first or every_<number>"
    if name == "verify_tolerance" and not (value is None or (type(value) in (int, float) and 0 < value < math.inf)):
        why = "is not a finite number above 0: one lets nothing pass, the other everything"
        return why, "null or <number above 0>"
    return None
