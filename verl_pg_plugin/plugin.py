"""Entering this plugin into verl's registries."""

import sys

__all__ = ["register"]


def register() -> None:
    """Put the engines, and on request the CPU default, in force; calling it again changes nothing.

    Where the import of a module of ours is what imports verl, the engines may need that very module: they wait for the
    next call, which ``PrefixGrouperEngineConfig`` makes when the mode is asked for. The CPU default registers itself
    when it was that module.

    Raises:
        Exception: what the import of verl or of an engine raises, or RuntimeError when another plugin holds our place.
    """
    from verl_pg_plugin import cpu

    if not _loading(cpu):
        cpu.register()
    if any(_loading(module) for name, module in list(sys.modules.items()) if name.startswith("verl_pg_plugin.")):
        return

    from verl_pg_plugin.engine.registration import register_engines  # verl asks for the platform on import

    register_engines()


def _loading(module: object) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)
