"""The section ``prefix_grouper`` of the trainer's config, and the values that its options take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_pg_plugin.attention.kernels import ATTENTION_KERNELS
from verl_pg_plugin.config.keys import OPTIONS
from verl_pg_plugin.config.violation import Setting, Violation

__all__ = ["OPTION_NAMES", "PrefixGrouperOptions", "not_boolean", "option_violations"]


@dataclass(frozen=True)
class PrefixGrouperOptions:
    """The section ``prefix_grouper`` of the trainer's config; every engine gets the same.

    Args:
        attention_kernel: kernel of packed mode, one of ``ATTENTION_KERNELS``.
        logits_chunk_size: rows of logits that the head of packed mode holds at once, or up to twice as many uncut;
            0 for all of them.
        static_rows: pad every micro-batch of packed mode to its token budget, so that compiled code sees one shape.
        compile_layers: ``torch.compile`` every decoder layer, around attention: auto does so wherever tests have shown
            that it works (``config.layer_compiler``), True wherever nothing is known to keep it from working.
        recompute_attention: gradient checkpointing runs the attention kernel again in the backward; False keeps its
            output, which takes about as much memory as the hidden states that are kept anyway.
        keep_activations: what gradient checkpointing keeps beside the layers' inputs. attention: the attention kernel's
            output. mlp: that, and what the MLPs compute. all: everything, so that the backward recomputes nothing. A
            number: as many whole layers as hold no more than so many GiB of a device besides. auto: from the third
            update on as many as fit into what a device has left, less a tenth of its memory
            (``engine.activation_budget``); attention where that is unknown.
        min_dedup_ratio: a micro-batch of packed mode that would share less than this (logical over physical tokens)
            runs as plain rmpad; 1 lets all of them share.
        verify: recompute some samples of live micro-batches alone and compare: off, first or every_n.
        verify_every: n of ``verify=every_n``, in micro-batches.
        verify_rows: samples to recompute in each.
        verify_tolerance: largest error per token, relative to the larger of 1 and the value; None for one that is
            measured in the run (``engine.steps.token_comparison``).
        on_mismatch: raise, or go on as rmpad.
        carry: auto lets groups of packed mode that exceed a micro-batch go on in the next where that is cheaper; never
            computes what they share again in each.
        console: short shows a line of a table for each step and the gain at the end; full leaves verl's log as it is,
            with the config in it and every metric of a step. Other loggers of ``trainer.logger`` get all either way.

    Raises:
        ValueError: for values of another type or outside these; one message names them all.
    """

    attention_kernel: str = "auto"
    logits_chunk_size: int = 2048
    static_rows: bool = False
    compile_layers: bool | str = "auto"
    recompute_attention: bool = False
    keep_activations: str | float = "attention"
    min_dedup_ratio: float = 1.0
    verify: str = "off"
    verify_every: int = 100
    verify_rows: int = 2
    verify_tolerance: float | None = None
    on_mismatch: str = "raise"
    carry: str = "auto"
    console: str = "short"

    def __post_init__(self) -> None:
        if wrong := list(option_violations(vars(self))):
            raise ValueError("; ".join(f"{found.settings[0]} {found.why}; set {found.fix}" for found in wrong))


OPTION_NAMES = tuple(option.name for option in fields(PrefixGrouperOptions))

Objection = tuple[str, str]
"""Why a value is not taken, and a value that is."""


def not_boolean(value: Any) -> Objection | None:
    """What speaks against a value where verl and this plugin read a boolean."""
    return None if isinstance(value, bool) else ("is not a boolean; the values are True and False", "True or False")


def _one_of(*known: str) -> Callable[[Any], Objection | None]:
    return lambda value: (
        None
        if isinstance(value, str) and value in known
        else (f"is unknown; the values are {', '.join(known)}", known[0])
    )


def _auto_or_boolean(value: Any) -> Objection | None:
    if isinstance(value, bool) or value == "auto":
        return None
    return "is neither auto nor a boolean; the values are auto, True and False without quotes", "auto"


def _at_least(least: int, *types: type[int] | type[float]) -> Callable[[Any], Objection | None]:
    kind = "number" if float in types else "integer"

    def objection(value: Any) -> Objection | None:
        if isinstance(value, bool) or not issubclass(type(value), types):
            return f"is not {'a' if kind == 'number' else 'an'} {kind}", f"<{kind} of at least {least}>"
        if not value >= least:  # nan too
            return f"is below {least}, the least that it takes", f"<{kind} of at least {least}>"
        return None

    return objection


def _above_zero_or_none(value: Any) -> Objection | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf):
        return None
    return "is not a finite number above 0: one lets nothing pass, the other everything", "null or <number above 0>"


_KEEPS = "auto, attention, mlp, all and GiB above 0 as a number without unit or quotes"


def _keeps(value: Any) -> Objection | None:
    if value in ("auto", "attention", "mlp", "all") and isinstance(value, str):
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return None
    return f"is unknown; the values are {_KEEPS}", "attention"


_OBJECTIONS: dict[str, Callable[[Any], Objection | None]] = {
    "attention_kernel": _one_of(*ATTENTION_KERNELS),
    "logits_chunk_size": _at_least(0, int),
    "static_rows": not_boolean,
    "compile_layers": _auto_or_boolean,
    "recompute_attention": not_boolean,
    "keep_activations": _keeps,
    "min_dedup_ratio": _at_least(1, int, float),
    "verify": _one_of("off", "first", "every_n"),
    "verify_every": _at_least(1, int),
    "verify_rows": _at_least(1, int),
    "verify_tolerance": _above_zero_or_none,
    "on_mismatch": _one_of("raise", "rmpad"),
    "carry": _one_of("auto", "never"),
    "console": _one_of("short", "full"),
}


def option_violations(options: Mapping[str, Any]) -> Iterator[Violation]:
    """Options whose value is of another type than it seems, unknown or out of range.

    Args:
        options: values by name.
    """
    for name in options:
        if name not in (*OPTION_NAMES, "_target_"):
            why = f"there is no such option; there are {', '.join(OPTION_NAMES)}"
            yield Violation("unknown_option", (Setting(f"{OPTIONS}.{name}", options[name]),), why, f"~{OPTIONS}.{name}")
    for name, objection_to in _OBJECTIONS.items():
        if name in options and (objection := objection_to(options[name])):
            why, value = objection
            rule = "attention_kernel" if name == "attention_kernel" else "option_value"
            key = f"{OPTIONS}.{name}"
            yield Violation(rule, (Setting(key, options[name]),), why, f"++{key}={value}")
