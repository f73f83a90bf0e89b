"""Do something once another package's module has been imported, whoever imports it and whenever."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

registrations: list[Callable[[], object]] = []
"""``verl_pg_plugin.register``, for preflight and engine configs: they may not import what is above them."""


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call ``action`` now if the module is there, else once, as soon as its import has ended; its errors are raised."""
    finder = _AfterImport(name, action)
    if name in sys.modules:
        action()
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


@dataclass
class _AfterImport(MetaPathFinder):
    """Finds one module as the finders behind it do, and runs the action once.

    It stays in ``sys.meta_path``: a thread that walks along the list while something is removed skips a finder.
    """

    name: str
    action: Callable[[], object]
    acted: bool = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name or self.acted or self not in (finders := [*sys.meta_path]):
            return None
        behind = finders[finders.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_act(module: ModuleType) -> None:
            run(module)  # an import that fails may be tried again
            if not self.acted:
                self.acted = True
                self.action()

        spec.loader.exec_module = run_then_act  # type: ignore[method-assign]
        return spec
