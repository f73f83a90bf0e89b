"""What keeps a run from starting, or may spoil it: the setting at fault, why, and what to set instead."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

SHARING_OFF = "set actor_rollout_ref.actor.use_prefix_grouper=False"


@dataclass(frozen=True)
class Issue:
    """One finding about a run.

    Attributes:
        setting: as on the command line, ``key=value``, with ``++`` for options of this plugin; the one to change first,
            others behind a comma; empty where no setting decides.
        why: cause in one sentence, without a final full stop.
        fix: override or command that removes it; empty leaves another checkpoint or stock verl.
        is_warning: the run may work all the same.
    """

    setting: str
    why: str
    fix: str = ""
    is_warning: bool = False

    @property
    def key(self) -> str:
        """Key of the first setting, without ``++``."""
        return self.setting.lstrip("+").partition("=")[0]

    @property
    def where(self) -> str:
        """The settings as messages show them."""
        return re.sub(r"=None(?=,|$)", " is not set", self.setting) or "(settings that the message names)"

    def __str__(self) -> str:
        return f"{self.where}\n   why: {self.why}" + (f"\n   fix: {self.fix}" if self.fix else "")


class ConfigError(ValueError):
    """A run that cannot start as configured."""

    def __init__(self, issues: Sequence[Issue]) -> None:
        count = f"{len(issues)} problem{'s' if len(issues) != 1 else ''} in the configuration"
        listing = "\n".join(f"{number}. {issue}" for number, issue in enumerate(issues, start=1))
        super().__init__(f"{count}, nothing was started:\n{listing}")


class BatchError(ValueError):
    """A batch that packed mode cannot compute; the message names the cause and the fix."""
