"""Rule reward of the arithmetic example, for verl's ``reward.custom_reward_function.path``.

The score is graded, so that a tiny model has something to climb before its first right answer. Of a response with
several turns only the last one counts: what a tool returned is no answer.
"""

from __future__ import annotations

from typing import Any

DIGIT_WEIGHT = 0.2
PLACE_WEIGHT = 0.3
EXACT_WEIGHT = 0.5
TRY_WEIGHT = 0.7
# What the chat template writes in front of the model's turns, without special tokens.
TURN = "assistant\n"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """Score a response in [0, 1].

    0.2 x share of characters that are digits, 0.3 x share of places (of the longer string) where response and
    answer agree, 0.5 for the exact answer. Only the exact answer scores 1.

    Args:
        data_source: unused, part of verl's interface.
        solution_str: the decoded response without special tokens.
        ground_truth: the answer, decimal digits.
        extra_info: unused, part of verl's interface.
    """
    solution_str = solution_str.rpartition(TURN)[2]
    if not solution_str:
        return 0.0
    digits = sum(character in "0123456789" for character in solution_str) / len(solution_str)
    agreeing = sum(a == b for a, b in zip(solution_str, ground_truth, strict=False))
    places = agreeing / max(len(solution_str), len(ground_truth))
    exact = solution_str == ground_truth
    return DIGIT_WEIGHT * digits + PLACE_WEIGHT * places + EXACT_WEIGHT * exact


def compute_score_of_tries(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: Any
) -> float:
    """Score a session that may try again, by its last answer: every further try takes 30% off.

    Without that a session that is right at last would reward its wrong answers like right ones.

    Args:
        data_source: unused, part of verl's interface.
        solution_str: the last answer.
        ground_truth: the answer, decimal digits.
        extra_info: of verl's reward manager; ``num_turns`` counts questions and answers.
    """
    tries = int(extra_info["num_turns"]) // 2
    return TRY_WEIGHT ** (tries - 1) * compute_score(data_source, solution_str, ground_truth)
