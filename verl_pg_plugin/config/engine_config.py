"""Engine config of the shared-prefix engine: verl's FSDP config plus the switches of this plugin."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.workers.config import FSDPEngineConfig

from verl_pg_plugin.after_import import run_waiting
from verl_pg_plugin.config.in_force import assert_in_force
from verl_pg_plugin.config.keys import FSDP_STRATEGIES
from verl_pg_plugin.config.options import PrefixGrouperOptions

__all__ = ["PrefixGrouperEngineConfig"]


@dataclass
class PrefixGrouperEngineConfig(FSDPEngineConfig):
    """``FSDPEngineConfig`` of verl 0.9 with the switch of this plugin.

    Args:
        use_prefix_grouper: store and compute every shared prefix once; off runs the stock engine.
        prefix_grouper: how.

    Raises:
        RuntimeError: when ``use_prefix_grouper`` is on and verl would build another engine class.
        Exception: what keeps our engines from being registered; the import of the package only logged it.
    """

    use_prefix_grouper: bool = False
    prefix_grouper: PrefixGrouperOptions = field(default_factory=PrefixGrouperOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_prefix_grouper:
            run_waiting()  # engines that could not be registered when verl was imported
            # FSDPActorConfig writes its own strategy into the engine config after this class is constructed,
            # so which of the two keys the worker will look up is not known yet.
            for strategy in FSDP_STRATEGIES:
                assert_in_force(strategy)
            from verl_pg_plugin.config.other_packages import say_once  # in the process that runs the engine

            say_once()
