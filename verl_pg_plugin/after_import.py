"""Run an action when a module of another package has been imported."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

registrations: list[Callable[[], object]] = []
"""``verl_pg_plugin.register``, for preflight and engine configs, which must not import the package root."""


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call ``action`` now if the module is loaded, else once after its import. Errors of the action propagate."""
    finder = _AfterImport(name, action)
    if name in sys.modules:
        action()
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


@dataclass
class _AfterImport(MetaPathFinder):
    """Find one module with the finders after this one, and run the action once.

    It stays in ``sys.meta_path``: a thread that iterates over the list during a removal would skip a finder.
    """

    name: str
    action: Callable[[], object]
    acted: bool = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name or self.acted or self not in (finders := [*sys.meta_path]):
            return None
        later = finders[finders.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_act(module: ModuleType) -> None:
            run(module)  # a failed import may be retried
            if not self.acted:
                self.acted = True
                self.action()

        spec.loader.exec_module = run_then_act  # type: ignore[method-assign]
        return spec
