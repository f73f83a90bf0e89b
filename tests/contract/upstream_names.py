"""Names of verl and transformers that a source file uses, and private ones of torch, read from its syntax."""

import ast
import sys
from functools import cache
from importlib.util import find_spec

UPSTREAM = ("verl", "transformers")
READ = (*UPSTREAM, "torch")


@cache
def is_module(path: str) -> bool:
    if path in sys.modules:  # one that is written in C has no file of its own
        return True
    try:
        return find_spec(path) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


class UpstreamNames(ast.NodeVisitor):
    """Dotted paths of the packages in ``READ`` that a file uses; a name counts in the function that imports it."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.modules: dict[str, str] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside, self.modules = self.modules, dict(self.modules)
        self.generic_visit(node)
        self.modules = outside

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            package = alias.name.partition(".")[0]
            if package in READ:
                self.modules[alias.asname or package] = alias.name if alias.asname else package

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] not in READ or node.level:
            return
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            if is_module(path):
                self.modules[alias.asname or alias.name] = path
            else:
                self.paths.add(path)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if module := self.module_named_by(node.value):
            path = f"{module}.{node.attr}"
            if not is_module(path):
                self.paths.add(path)
        self.generic_visit(node)

    def module_named_by(self, node: ast.expr) -> str | None:
        """Dotted path of an upstream module that is written as a name or as attributes of one."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id)
        if isinstance(node, ast.Attribute) and (parent := self.module_named_by(node.value)):
            path = f"{parent}.{node.attr}"
            return path if is_module(path) else None
        return None


def upstream_names(source: str) -> set[str]:
    visitor = UpstreamNames()
    visitor.visit(ast.parse(source))
    return {path for path in visitor.paths if not path.startswith("torch.") or is_private(path)}


def is_private(path: str) -> bool:
    return any(name.startswith("_") and not name.startswith("__") for name in path.split("."))
