"""Do something once another package's module has been imported, whoever imports it and whenever."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

waiting: list[Callable[[], object]] = []
"""What could not be registered while one of this package's modules was being imported; engine configs call it."""


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call ``action`` now if the module is there, else once, as soon as its import has ended; its errors are raised."""
    finder = _AfterImport(name, action)
    if name in sys.modules:
        action()
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


@dataclass(frozen=True)
class _AfterImport(MetaPathFinder):
    """Finds one module as the other finders do, and runs the action behind it."""

    name: str
    action: Callable[[], object]

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # so that this asks the finders that can find it
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_act(module: ModuleType) -> None:
            run(module)  # an import that fails may be tried again
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action()

        spec.loader.exec_module = run_then_act  # type: ignore[method-assign]
        return spec
