"""Configuration of the plugin: engine config, modes, validators and Hydra files.

The validators are imported from :mod:`verl_pg_plugin.config.validate`: they load transformers, which the
engine config, imported in every worker, need not wait for.
"""

from verl_pg_plugin.config.engine_config import PrefixGrouperEngineConfig, PrefixGrouperOptions
from verl_pg_plugin.config.mode import Mode, mode_of

__all__ = ["Mode", "PrefixGrouperEngineConfig", "PrefixGrouperOptions", "mode_of"]
