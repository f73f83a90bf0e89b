"""Which seed each prompt of a run is sampled with."""

from __future__ import annotations

from collections import Counter
from typing import Any

from verl_pg_plugin.cpu.sampling import derived_seed


class PromptSeeds:
    """Seeds of the prompts of one run, in the order in which the trainer submits them."""

    def __init__(self, run_seed: int) -> None:
        self.run_seed = run_seed
        self._step: int | None = None
        self._submitted: Counter[tuple[bool, Any]] = Counter()

    def of(self, step: int, validate: bool, rows: list[Any]) -> list[int]:
        """One seed a prompt.

        A row that is submitted again within a step draws anew: data sets without ``extra_info.index`` call every
        row 0, and some repeat theirs.

        Args:
            step: the trainer's ``global_steps``.
            validate: whether the prompts are for validation.
            rows: the ``index`` of each prompt in its data set.
        """
        if step != self._step:
            self._step, self._submitted = step, Counter()
        seeds = []
        for row in rows:
            seeds.append(derived_seed(self.run_seed, step, validate, row, self._submitted[validate, row]))
            self._submitted[validate, row] += 1
        return seeds
