"""RL training in verl that computes every shared prompt once and never a padding token.

verl imports this package in each of its processes (entry point group ``verl.plugins``). That registers the engines, and
on request the CPU default. Imported without verl it loads nothing, and registers as soon as verl is imported.

A registration that fails is a logged warning: verl would swallow an exception. A run that asks for the mode still ends,
since ``PrefixGrouperEngineConfig`` checks that the engines are in force.
"""

import logging

from verl_pg_plugin.after_import import after_import, wait

__version__ = "0.1.0"

logger = logging.getLogger(__name__)


def register() -> None:
    """Put the engines, and on request the CPU default, in force; calling it again changes nothing.

    Raises:
        Exception: what the import of verl or of an engine raises, or RuntimeError when another plugin holds our place.
    """
    from verl_pg_plugin import plugin

    plugin.register()


def _register_or_warn() -> None:
    try:
        register()
    except Exception as error:
        wait(register)  # whoever builds one of our engine configs gets the exception
        logger.warning(
            "verl_pg_plugin %s: engines are not registered (%s: %s); python -m verl_pg_plugin doctor says more",
            __version__,
            type(error).__name__,
            error,
        )
    else:
        logger.info("verl_pg_plugin %s: engines registered for fsdp and fsdp2", __version__)


# verl's entry point cannot register in a process that imported this package first: loading it again runs nothing.
after_import("verl", _register_or_warn)
