"""What every process decides from its own machine, and whether the other ranks decided the same."""

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch.distributed as dist
from verl.utils.device import get_device_name

from verl_pg_plugin.attention.kernels import (
    ATTENTION_KERNEL,
    KERNELS,
    AttentionNeeds,
    Kernel,
    model_obstacle,
    select_kernel,
)
from verl_pg_plugin.config.facts import Facts
from verl_pg_plugin.config.layer_compiler import COMPILE_LAYERS, CompilerFacts, Decision, decide
from verl_pg_plugin.engine.ranks import gather_on_every_rank
from verl_pg_plugin.mixers.attention import attention_needs

logger = logging.getLogger(__name__)


class RanksDifferError(RuntimeError):
    """Ranks decided differently, because their machines differ."""


@dataclass(frozen=True)
class LocalChoices:
    """Choices that depend on what a machine has installed; the same on every rank.

    Attributes:
        kernel: the attention kernel.
        layer_compilation: whether decoder layers are compiled, and why.
    """

    kernel: Kernel
    layer_compilation: Decision

    def log(self, mode: str) -> None:
        """Say them, once in a run. A warning, because verl's workers hide all below and they decide a run's speed."""
        logger.warning("%s mode: attention kernel %s (%s)", mode, self.kernel.name, self.kernel.reason)
        layers = "%s mode: layers compiled (%s)" if self.layer_compilation.on else "%s mode: layers not compiled (%s)"
        logger.warning(layers, mode, self.layer_compilation.reason)


@dataclass(frozen=True)
class Told:
    """What a rank tells the others.

    Attributes:
        host: name of its machine.
        kernel, layers: what it chose, and why.
        runnable: kernels that ``auto`` may take or fall back to, and that run there.
    """

    host: str
    kernel: tuple[str, str]
    layers: tuple[str, str]
    runnable: frozenset[str]


def choose_alike(engine_config: Any, model_config: Any, group: dist.ProcessGroup | None) -> LocalChoices:
    """Choose on this machine, and go on if every rank of the group has chosen the same.

    With other kernels the log-probs of ranks would differ; where one rank compiles nothing, all others wait for it.

    Args:
        engine_config: a ``PrefixGrouperEngineConfig``.
        model_config: verl's ``HFModelConfig``.

    Raises:
        ValueError, RuntimeError: no kernel, see ``select_kernel``; on the other ranks a ``RankError``.
        RanksDifferError: on every rank; names ranks, choices, reasons and the overrides that fix it.
    """
    options, device = engine_config.prefix_grouper, get_device_name()
    needs = attention_needs(model_config.hf_config.get_text_config())
    chosen: list[LocalChoices] = []

    def choose() -> Told:
        kernel = select_kernel(options.attention_kernel, device, needs)
        facts = CompilerFacts.of(Facts.from_engine(engine_config, model_config))
        layers = decide(options.compile_layers, facts)
        chosen.append(LocalChoices(kernel, layers))
        return Told(
            platform.node(), (kernel.name, kernel.reason), (_layers(layers), layers.reason), _runnable(device, needs)
        )

    differences = describe_differences(gather_on_every_rank(choose, group))
    if differences:
        raise RanksDifferError(differences)
    return chosen[0]


def _layers(decision: Decision) -> str:
    return "layers compiled" if decision.on else "layers not compiled"


def _runnable(device_type: str, needs: AttentionNeeds) -> frozenset[str]:
    return frozenset(name for name in KERNELS if not model_obstacle(name, device_type, needs))


def describe_differences(ranks: Sequence[Told]) -> str:
    """What ranks chose, where they chose differently, and how to make them choose alike; empty if they did."""
    found = []
    if len({told.kernel[0] for told in ranks}) > 1:
        common = [name for name in KERNELS if all(name in told.runnable for told in ranks)]
        override = f", or set ++{ATTENTION_KERNEL}={common[0]}, which all can run" if common else ""
        choices = _who_chose(ranks, [told.kernel for told in ranks])
        found.append(f"attention kernels: {choices}; give all machines what some lack{override}")
    if len({told.layers[0] for told in ranks}) > 1:
        choices = _who_chose(ranks, [told.layers for told in ranks])
        found.append(f"{choices}; give all machines what some lack, or set ++{COMPILE_LAYERS}=False")
    return f"ranks decided differently, as their machines differ: {'; '.join(found)}" if found else ""


def _who_chose(ranks: Sequence[Told], choices: Sequence[tuple[str, str]]) -> str:
    """Every choice with its reason, the ranks that made it, and their machines."""
    described = []
    for choice in dict.fromkeys(choices):
        who = [rank for rank, other in enumerate(choices) if other == choice]
        hosts = ", ".join(dict.fromkeys(ranks[rank].host for rank in who))
        described.append(f"{choice[0]} on {_named(who)} of {hosts} ({choice[1]})")
    return ", ".join(described)


def _named(ranks: Sequence[int]) -> str:
    """Ascending ranks, neighbours as a span: ``ranks 0-3, 7``."""
    spans = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        first, *others = (rank for _, rank in run)
        spans.append(f"{first}-{others[-1]}" if others else str(first))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(spans)}"
