"""Entering this plugin into verl's registries."""

import sys

__all__ = ["register"]


def register() -> None:
    """Put the engines, and on request the CPU default, in force; calling it again changes nothing.

    Where the import of a module of ours is what imports verl, the engines may need that very module: they wait for the
    next call, which ``PrefixGrouperEngineConfig`` makes when the mode is asked for.

    Raises:
        Exception: what the import of verl or of an engine raises, or RuntimeError when another plugin holds our place.
    """
    from verl_pg_plugin import cpu

    cpu.register()
    if _half_loaded():
        return

    from verl_pg_plugin.engine.registration import register_engines  # verl asks for the platform on import

    register_engines()


def _half_loaded() -> bool:
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("verl_pg_plugin.")]
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in ours)
