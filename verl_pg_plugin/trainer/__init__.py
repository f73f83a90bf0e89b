"""verl's trainers, V1 and V0, with the groups of a batch kept on one rank.

Where the plugin is in force and a run shares prefixes, this happens by itself: V1 looks its trainer up by name and gets
the class registered under that name through ``keep_groups``, whoever registered it; V0's trainers, and those of
recipes derived from them, deal groups out at the end of verl's own ``_balance_batch`` (``upstream/``). A trainer that
neither way reaches is wrapped where it is made::

    from verl_pg_plugin.trainer import keep_groups

    @register_trainer("mine")
    @keep_groups
    class MyTrainer(PPOTrainerSync): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_pg_plugin.trainer.any_trainer import keep_groups

__all__ = ["keep_groups"]


def __getattr__(name: str) -> Any:
    """Every process of a run imports this package for a name, and one needs the trainers behind it."""
    if name != "keep_groups":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl_pg_plugin.trainer.any_trainer import keep_groups

    return keep_groups
