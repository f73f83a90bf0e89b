"""Why an architecture is rejected."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One reason; an empty ``fix`` leaves another checkpoint or mode as the way out."""

    why: str
    fix: str = ""
