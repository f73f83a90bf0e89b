"""Why an architecture is rejected."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reason:
    """One reason.

    Attributes:
        why: cause in one sentence, without a final full stop.
        fix: what to do; empty leaves another checkpoint or mode as the way out.
        field: name and value of the entry of the checkpoint's config that decides it; empty where many do.
    """

    why: str
    fix: str = ""
    field: tuple[str, Any] | tuple[()] = ()
