"""Entering this plugin into verl's registries."""

__all__ = ["register"]


def register() -> None:
    """Put the engines, and on request the CPU default, in force; calling it again changes nothing.

    Raises:
        Exception: what the import of verl or of an engine raises, or RuntimeError when another plugin holds our place.
    """
    from verl_pg_plugin import cpu

    cpu.register()

    from verl_pg_plugin.engine.registration import register_engines  # verl asks for the platform on import

    register_engines()
