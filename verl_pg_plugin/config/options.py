"""The section ``prefix_grouper`` of the trainer config and the values of its options."""

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
    """The section ``prefix_grouper`` of the trainer config, which every engine receives.

    Args:
        attention_kernel: attention kernel of packed mode. auto selects the fastest that is installed and supports the
            model.
        activations: tensors that each decoder layer keeps for its backward with gradient checkpointing on, and where.
            all: every activation; nothing is recomputed. attention: the layer's inputs, and the attention kernel's
            output and log-sum-exp. attention_on_host: the same tensors, in pinned host memory. inputs: only the
            layer's inputs; the backward recomputes attention. inputs_on_host: the inputs, in pinned host memory. auto
            selects per micro-batch the first of attention, attention_on_host and inputs_on_host that fits. Gradients
            are bitwise equal at all levels that split groups in the same way.
        compile_layers: run ``torch.compile`` on every decoder layer, except its attention. auto compiles on a GPU the
            model types that were tested compiled on one (``tested.py``). True compiles wherever possible.
        logits_chunk_size: tokens per chunk of logits in packed mode. Up to twice as many stay one chunk; 0 never cuts.
        prefix_cache: auto lets the chunks of a split group read their prefix from a cache if that is cheaper. off
            recomputes the prefix in each chunk.
        old_log_prob: auto takes old log-probs from the update where a batch is one optimizer step and nothing else
            reads them; the log names each reason otherwise. always computes them in a separate forward.
        rollout: auto routes the samples of a prompt to one server, lets vLLM read a shared prompt once per decode
            step, and polls for finished responses every 0.1 s, each if it pays. off leaves rollouts unchanged.
        verify: recompute two samples of a micro-batch, each in a separate forward, compare the outputs of their
            response tokens, and end the run if they differ. Each engine counts forwards alone and updates separately.
            first checks the first micro-batch with shared tokens, and the first in which attention crosses segments.
            every_100 checks the first and every 100th after it, off none. auto checks models of which no test covers
            a class, a forward, the type or a boolean of the config. It checks all micro-batches of the first
            mini-batch and, if attention crossed no segments there, those that do in the first later mini-batch.
        verify_tolerance: largest error per token, relative to values above 1. null measures it during the run.

    Raises:
        ValueError: if values are invalid; the message names them all.
    """

    attention_kernel: str = "auto"
    activations: str = "auto"
    compile_layers: bool | str = "auto"
    logits_chunk_size: int = 2048
    prefix_cache: str = "auto"
    old_log_prob: str = "auto"
    rollout: str = "auto"
    verify: str = "auto"
    verify_tolerance: float | None = None

    def __post_init__(self) -> None:
        if issues := list(option_issues(vars(self))):
            raise ValueError("; ".join(f"{issue.setting}: {issue.why}. Fix: {issue.fix}" for issue in issues))

    @property
    def verify_period(self) -> int | None:
        """Verify every n-th micro-batch: n, 0 for the first only, None for none or auto."""
        every = re.fullmatch(_EVERY, self.verify)
        return int(every[1]) if every else {"first": 0}.get(self.verify)


OPTION_NAMES = tuple(option.name for option in fields(PrefixGrouperOptions))

_EVERY = r"every_([1-9]\d*)"

_WORDS: dict[str, tuple[str, ...]] = {
    "attention_kernel": ATTENTION_KERNELS,
    "activations": ("auto", *(level.value for level in Level)),
    "prefix_cache": ("auto", "off"),
    "old_log_prob": ("auto", "always"),
    "rollout": ("auto", "off"),
}
"""Options with a fixed list of values."""


def force_add(override: str) -> str:
    """Return an override of an option with ``++``, which Hydra accepts whether or not the config has the option."""
    return re.sub(rf"^\+*(?={OPTIONS}\.)", "++", override)


_RENAMED = {"carry": "prefix_cache"}


def option_issues(options: Mapping[str, Any], section: str = f"++{OPTIONS}") -> Iterator[Issue]:
    """Yield an issue for each unknown option and each invalid value of a section's options, values by name."""
    for name, value in options.items():
        setting = f"{section}.{name}={value}"
        if name in OPTION_NAMES:
            if fault := _fault(name, value):
                yield Issue(setting, fault[0], f"{section}.{name}={fault[1]}")
        elif name != "_target_":
            close = [_RENAMED[name]] if name in _RENAMED else difflib.get_close_matches(name, OPTION_NAMES, n=1)
            why = f"no such option; the options are {', '.join(OPTION_NAMES)}"
            fix = f"did you mean {section}.{close[0]}={value}?" if close else "remove it"
            yield Issue(setting, why, fix)


def _fault(name: str, value: Any) -> tuple[str, str] | None:
    """Return why a value is invalid for an option, and the valid values; None if it is valid."""
    if name in _WORDS:
        words = _WORDS[name]
        return None if value in words else (f"is unknown; the values are {', '.join(words)}", words[0])
    if name == "compile_layers" and not (value == "auto" or isinstance(value, bool)):
        return "is unknown; the values are auto, True and False without quotes", "auto"
    if name == "logits_chunk_size" and not (type(value) is int and value >= 0):
        return "must be an integer >= 0", "<non-negative integer>"
    if name == "verify" and not (value in ("auto", "off", "first") or re.fullmatch(_EVERY, str(value))):
        return "is unknown; the values are auto, off, first and every_<number>", "auto, off, first or every_<number>"
    if name == "verify_tolerance" and not (value is None or (type(value) in (int, float) and 0 < value < math.inf)):
        return "must be a finite number > 0 or null", "null or <positive number>"
    return None
