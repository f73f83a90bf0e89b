"""Which module of the package imports which, read from the syntax of its files."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, frozenset[str]]


def module_files(package: Path) -> dict[str, Path]:
    """Dotted name and file of every module below the folder of a package; a package goes by its own name."""
    files = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def import_graph(package: Path) -> Graph:
    """For every module the modules it imports, those of other packages by their full dotted name.

    An import inside a function counts, one under ``if TYPE_CHECKING`` does not. Importing a package counts as importing
    its ``__init__``; the parents that Python imports on the way to a module do not count. What is imported by a string
    (``importlib``) is not seen.
    """
    files = module_files(package)
    graph = {}
    for name, file in files.items():
        base = name if file.name == "__init__.py" else name.rpartition(".")[0]
        imported = _Imports(base, frozenset(files))
        imported.visit(ast.parse(file.read_text()))
        graph[name] = frozenset(imported.names)
    return graph


class _Imports(ast.NodeVisitor):
    """Names of the modules that one module imports."""

    def __init__(self, base: str, known: frozenset[str]) -> None:
        self.base = base
        self.known = known
        self.names: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        self.names |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            parents = self.base.split(".")
            start = parents[: len(parents) - node.level + 1]
            module = ".".join([*start, module] if module else start)
        for alias in node.names:
            submodule = f"{module}.{alias.name}"
            self.names.add(submodule if submodule in self.known else module)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)


def reachable(graph: Graph, start: str) -> set[str]:
    """Everything that a module imports, directly or through modules of the graph."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def circles(graph: Graph) -> Iterator[list[str]]:
    """One shortest way round for every set of modules that import each other, its first module again at the end."""
    seen: set[str] = set()
    for name in sorted(graph):
        if name in seen or name not in (ring := reachable(graph, name)):
            continue
        seen |= {other for other in ring if name in reachable(graph, other)}
        yield _way_round(graph, name)


def _way_round(graph: Graph, name: str) -> list[str]:
    came_from: dict[str, str] = {}
    waiting = [name]
    while name not in came_from:
        here = waiting.pop(0)
        for module in sorted(graph.get(here, ())):
            if module not in came_from:
                came_from[module] = here
                waiting.append(module)
    way = [name, came_from[name]]
    while way[-1] != name:
        way.append(came_from[way[-1]])
    return way[::-1]
