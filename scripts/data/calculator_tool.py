"""Tool of the multi-turn example, for verl's ``actor_rollout_ref.rollout.multi_turn.function_tool_path``."""

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return str(a + b)
