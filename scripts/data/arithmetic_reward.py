"""Rule rewards of the arithmetic example, for verl's ``reward.custom_reward_function.path``."""

from typing import Any

from verl_pg_plugin.demo import compute_score

__all__ = ["compute_score", "compute_score_of_tries"]

TRY_WEIGHT = 0.7


def compute_score_of_tries(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: Any
) -> float:
    """Score a session by its last answer; every retry takes 30% off, so that wrong answers are not rewarded fully.

    ``extra_info`` is from verl's reward manager; its ``num_turns`` counts questions and answers.
    """
    tries = int(extra_info["num_turns"]) // 2
    return TRY_WEIGHT ** (tries - 1) * compute_score(data_source, solution_str, ground_truth)
