"""What sharing saved over the steps of a run: rows, FLOPs, and an estimate in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["DEDUP_RATIO", "PHASES", "Gain"]

PREFIX = "actor/prefix_grouper/"
LOGICAL, PHYSICAL = f"{PREFIX}logical_tokens", f"{PREFIX}physical_tokens"
DEDUP_RATIO, GROUPS_ALONE = f"{PREFIX}dedup_ratio", f"{PREFIX}dedup_ratio_of_groups"
FLOP_RATIO = f"{PREFIX}flop_ratio"
TOKENS = "perf/total_num_tokens"
PHASES = ("old_log_prob", "ref", "update_actor")
"""What the actor's engine computes, as ``timing_s`` names it; the critic's savings are not counted."""


@dataclass(frozen=True)
class Gain:
    """Sums over steps.

    Attributes:
        num_steps: steps that shared.
        tokens: of all sequences of those steps, each taken alone.
        rows: that the model computed in their place, once through.
        weighted_flop_ratio, weighted_groups_alone: FLOPs of every sequence alone over those of the shared rows, and the
            ratio of tokens to rows that sharing whole prompts would have given, each times the step's tokens.
        seconds: by phase, as measured.
        saved_seconds: by phase, what stock verl would have taken more, were time proportional to FLOPs.
    """

    num_steps: int = 0
    tokens: float = 0.0
    rows: float = 0.0
    weighted_flop_ratio: float = 0.0
    weighted_groups_alone: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    saved_seconds: Mapping[str, float] = field(default_factory=dict)

    def with_step(self, metrics: Mapping[str, float]) -> Gain:
        """The sums with one more step; one that shared nothing, or told nothing of it, changes none.

        Args:
            metrics: of the step, by verl's names.
        """
        if LOGICAL not in metrics or PHYSICAL not in metrics:
            return self
        dedup = metrics[LOGICAL] / metrics[PHYSICAL]
        flop_ratio = metrics.get(FLOP_RATIO, dedup)
        tokens = metrics.get(TOKENS, metrics[LOGICAL])
        seconds = {phase: metrics[f"timing_s/{phase}"] for phase in PHASES if f"timing_s/{phase}" in metrics}
        return replace(
            self,
            num_steps=self.num_steps + 1,
            tokens=self.tokens + tokens,
            rows=self.rows + tokens / dedup,
            weighted_flop_ratio=self.weighted_flop_ratio + tokens * flop_ratio,
            weighted_groups_alone=self.weighted_groups_alone + tokens * metrics.get(GROUPS_ALONE, dedup),
            seconds=_added(self.seconds, seconds),
            saved_seconds=_added(self.saved_seconds, {name: s * (flop_ratio - 1) for name, s in seconds.items()}),
        )

    @property
    def dedup_ratio(self) -> float:
        """Tokens that each computed row stands for."""
        return self.tokens / self.rows

    @property
    def flop_ratio(self) -> float:
        """FLOPs of every sequence alone over those of the shared rows."""
        return self.weighted_flop_ratio / self.tokens

    def lines(self) -> list[str]:
        """The gain in words; nothing for a run that shared nothing."""
        if not self.num_steps:
            return []
        saved, passes = self.tokens - self.rows, ", ".join(self.seconds)
        lines = [
            f"shared prefixes: {saved:,.0f} of {self.tokens:,.0f} rows never computed ({saved / self.tokens:.0%}), "
            f"in each of {passes or 'its passes'}; a row that was computed stands for {self.dedup_ratio:.2f} tokens"
        ]
        groups_alone = self.weighted_groups_alone / self.tokens
        if self.dedup_ratio > 1.05 * groups_alone:
            lines.append(
                f"  {groups_alone:.2f} of that is what the responses to one prompt share; the rest is that prompts "
                "begin alike (a common preamble), which is computed once for all prompts of a micro-batch"
            )
        lines.append(f"FLOPs: {self.flop_ratio:.2f} times fewer than with every sequence alone")
        if not self.seconds:
            return lines
        parts = ", ".join(f"{name} {value:,.1f} s" for name, value in self.saved_seconds.items())
        took = sum(self.seconds.values())
        lines.append(
            f"time, if it follows FLOPs: {sum(self.saved_seconds.values()):,.1f} s saved beside {took:,.1f} s taken "
            f"({parts}); small models and short prompts are bound by launches and gain less"
        )
        return lines


def _added(sums: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    return {name: sums.get(name, 0.0) + values.get(name, 0.0) for name in {**sums, **values}}
