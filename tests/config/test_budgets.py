"""A token budget that just holds the longest sequence is enough, and ranks that share a sequence share its budget."""

from __future__ import annotations

import pytest

from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.before_ray.budgets import budget_violations

ACTOR = "actor_rollout_ref.actor"
KEY = f"{ACTOR}.ppo_max_token_len_per_gpu"
LENGTHS = {
    "data.max_prompt_length": 100,
    "data.max_response_length": 60,
    "actor_rollout_ref.rollout.max_model_len": None,
}


@pytest.mark.parametrize(
    ("mode", "sp_size", "budget", "fix"),
    [
        (Mode.PACKED, 1, 159, None),
        (Mode.PACKED, 1, 158, 159),
        (Mode.PACKED, 2, 80, None),
        (Mode.PACKED, 2, 79, 80),
        (Mode.RMPAD, 1, 160, None),
        (Mode.RMPAD, 1, 159, 160),
    ],
)
def test_the_longest_sequence_that_the_data_allow_must_fit(
    make_config, mode: Mode, sp_size: int, budget: int, fix: int | None
) -> None:
    """159 rows in packed mode: nothing is predicted from the last token."""
    sizes = {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": sp_size, KEY: budget}
    found = budget_violations(make_config(mode, {**LENGTHS, f"{ACTOR}.use_dynamic_bsz": True, **sizes}))
    fixes = [violation.fix for violation in found if violation.settings[0].key == KEY]
    assert fixes == ([] if fix is None else [f"{KEY}={fix}"])
