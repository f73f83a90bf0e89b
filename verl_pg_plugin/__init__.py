"""RL training in verl that computes every shared prompt once and never a padding token.

verl imports this package in each of its processes (entry point group ``verl.plugins``), and that registers the engines,
and on request the CPU default, with verl's registries; it starts no CUDA context and imports no attention kernels and
no vLLM. Imported without verl the package loads nothing, and registers as soon as verl is imported.

A registration that fails is a logged warning and no exception: verl would swallow that (it logs it at DEBUG), and
``python -m verl_pg_plugin doctor``, which imports this package first, could not report it. A run that asks for the mode
still ends there, since ``PrefixGrouperEngineConfig`` checks again that the engines are in force.
"""

import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

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
        logger.warning(
            "verl_pg_plugin %s: engines are not registered (%s: %s); python -m verl_pg_plugin doctor says more",
            __version__,
            type(error).__name__,
            error,
        )
    else:
        logger.info("verl_pg_plugin %s: engines registered for fsdp and fsdp2", __version__)


class _RegisterAfterVerl(MetaPathFinder):
    """Registers once the import of verl has ended.

    verl's entry point cannot do it in a process that imported this package first: loading it again runs nothing.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "verl":
            return None
        sys.meta_path.remove(self)  # so that this asks the finders that can find it
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_register(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            run(module)
            _register_or_warn()

        spec.loader.exec_module = run_then_register  # type: ignore[method-assign]
        return spec


if "verl" in sys.modules:
    _register_or_warn()
else:
    sys.meta_path.insert(0, _RegisterAfterVerl())
