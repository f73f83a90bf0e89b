"""Configuration of the plugin: options, modes, engine config, rules, preflight and Hydra files.

Importing it loads neither verl nor torch; the engine configs, which subclass verl's, load on first use.
"""

from typing import TYPE_CHECKING, Any

from verl_pg_plugin.config.mode import Mode, mode_of
from verl_pg_plugin.config.options import PrefixGrouperOptions

if TYPE_CHECKING:
    from verl_pg_plugin.config.engine_config import PrefixGrouperEngineConfig, PrefixGrouperVeOmniEngineConfig

__all__ = ["Mode", "PrefixGrouperEngineConfig", "PrefixGrouperOptions", "PrefixGrouperVeOmniEngineConfig", "mode_of"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from verl_pg_plugin.config import engine_config

        return getattr(engine_config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
