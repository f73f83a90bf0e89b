"""verl's engine configs for FSDP and VeOmni with the flag and the options of this plugin."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from verl.workers.config import FSDPEngineConfig, VeOmniEngineConfig
from verl.workers.engine.base import EngineRegistry

from verl_pg_plugin.after_import import registrations
from verl_pg_plugin.config.keys import FSDP_STRATEGIES, OPTIONS, VEOMNI
from verl_pg_plugin.config.options import PrefixGrouperOptions, option_issues
from verl_pg_plugin.issue import ConfigError, Issue


@dataclass
class PrefixGrouperEngineConfig(FSDPEngineConfig):
    """``FSDPEngineConfig`` with this plugin's flag and options; RuntimeError if verl would build a foreign engine."""

    use_prefix_grouper: bool = False  # compute every shared prefix once; False runs the stock engine
    prefix_grouper: PrefixGrouperOptions = field(default_factory=PrefixGrouperOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        _read_options(self)
        if self.use_prefix_grouper:  # FSDPActorConfig sets the strategy, one of two, later
            _assert_all_in_force(*FSDP_STRATEGIES)


@dataclass
class PrefixGrouperVeOmniEngineConfig(VeOmniEngineConfig):
    """``VeOmniEngineConfig`` with this plugin's flag and options; RuntimeError if verl would build a foreign engine."""

    use_prefix_grouper: bool = False
    prefix_grouper: PrefixGrouperOptions = field(default_factory=PrefixGrouperOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        _read_options(self)
        # A driver may lack the package; the workers check again.
        if self.use_prefix_grouper and importlib.util.find_spec("veomni") is not None:
            _assert_all_in_force(VEOMNI)

    @property
    def use_no_sync_for_gradient_accumulation(self) -> bool:
        """False: VeOmni never keeps unsharded gradients between micro-batches. FSDP reads this name."""
        return False


def _read_options(engine: PrefixGrouperEngineConfig | PrefixGrouperVeOmniEngineConfig) -> None:
    """Check and convert the options of an SFT run: a mapping that no preflight has checked."""
    if isinstance(options := engine.prefix_grouper, Mapping):
        given = {str(name): value for name, value in options.items() if name != "_target_"}
        if issues := list(option_issues(given, f"+engine.{OPTIONS}")):
            raise ConfigError(issues)
        object.__setattr__(engine, "prefix_grouper", PrefixGrouperOptions(**given))
    elif not isinstance(options, PrefixGrouperOptions):
        fix = f"+engine.{OPTIONS}.<option>=<value>, or remove it"
        raise ConfigError([Issue(f"+engine.{OPTIONS}={options}", "is not a section of options", fix)])
    if (flag := engine.use_prefix_grouper) not in (None, True, False):  # 1 and 0 too, as in preflight
        raise ConfigError([Issue(f"use_prefix_grouper={flag}", "is not a boolean", "True or False")])


def assert_in_force(strategy: str, model_type: str = "language_model") -> str:
    """Return the name of the engine that verl would build here; RuntimeError unless it is or derives from ours."""
    engine_cls = EngineRegistry.get_engine_cls(model_type, strategy)
    if not any(base.__module__.startswith("verl_pg_plugin.") for base in engine_cls.__mro__):
        name = f"{engine_cls.__module__}.{engine_cls.__qualname__} for strategy {strategy}"
        raise RuntimeError(
            f"actor.use_prefix_grouper=True, but verl would build {name} and silently share nothing. Fix: unset "
            "VERL_ENGINE_DEVICE and VERL_ENGINE_VENDOR, include verl_pg_plugin in VERL_USE_EXTERNAL_PLUGINS, and run "
            "python -m verl_pg_plugin doctor"
        )
    return str(engine_cls.__qualname__)


def _assert_all_in_force(*strategies: str) -> None:
    for register in registrations:
        register()
    for strategy in strategies:
        assert_in_force(strategy)
