"""Issues of a run: the setting, the cause and the fix."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

SHARING_OFF = "set actor_rollout_ref.actor.use_prefix_grouper=False"


@dataclass(frozen=True)
class Issue:
    """A setting that prevents a run, or may break it.

    Attributes:
        setting: ``key=value`` as on the command line, with ``++`` for options of this plugin; more after commas. Empty
            if no setting decides.
        why: the cause, without a final full stop.
        fix: override or command that resolves the issue; empty if only another checkpoint or stock verl does.
        is_warning: the run may still work.
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
        """The settings, as shown in messages."""
        return re.sub(r"=None(?=,|$)", " is not set", self.setting) or "(settings that the message names)"

    def __str__(self) -> str:
        return f"{self.where}\n   why: {self.why}" + (f"\n   fix: {self.fix}" if self.fix else "")


class ConfigError(ValueError):
    """A run cannot start as configured."""

    def __init__(self, issues: Sequence[Issue]) -> None:
        count = f"{len(issues)} problem{'s' if len(issues) != 1 else ''} in the configuration"
        listing = "\n".join(f"{number}. {issue}" for number, issue in enumerate(issues, start=1))
        super().__init__(f"{count}, nothing was started:\n{listing}")


class BatchError(ValueError):
    """Packed mode cannot compute a batch; the message has the cause and the fix."""
