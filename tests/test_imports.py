"""Imports go down the levels of docs/design.md, have no cycles, and index maths needs no heavy package."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "verl_pg_plugin"
LEVELS = (
    {"issue", "layout", "packing", "upstream", "compat", "after_import", "rollout", "transfer"},
    {"attention"},
    {
        *("mixers", "modalities", "architectures", "tested", "lm_head", "skeleton", "gradient_checkpointing"),
        *("models", "cpu"),
    },
    {"planning"},
    {"config"},
    {"engine", "trainer"},
    {"cli", "demo"},
    {"main_ppo", "__main__"},
)
HEAVY = {"torch", "verl", "transformers", "tensordict", "ray"}


def imports_of(file: Path) -> set[str]:
    """Return the dotted names that a module imports, inside functions and for types too."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        waiting.extend(ast.iter_child_nodes(node))
    return names


def graph_of(package: Path) -> dict[str, set[str]]:
    """Return every module of a package and what it imports; modules of the package by their own name."""
    files = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph = {}
    for name, file in files.items():
        imported = imports_of(file)
        # ``from verl_pg_plugin.layout import order`` names the package too, but does not need its __init__.
        ours = {max((m for m in files if i == m or i.startswith(f"{m}.")), key=len, default=i) for i in imported}
        graph[name] = {i for i in ours if not any(j != i and j.startswith(f"{i}.") for j in ours & set(files))} - {name}
    return graph


GRAPH = graph_of(PACKAGE)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached, waiting = set[str](), [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - reached
        reached |= new
        waiting.extend(new)
    return reached


def level_of(module: str) -> int:
    return next(number for number, packages in enumerate(LEVELS) if module.split(".")[1] in packages)


def test_no_import_goes_up_a_level_or_in_a_cycle() -> None:
    ours = {name: {i for i in imported if i.startswith("verl_pg_plugin.")} for name, imported in GRAPH.items()}
    edges = [(module, name) for module in ours if "." in module for name in ours[module]]
    assert [edge for edge in edges if level_of(edge[1]) > level_of(edge[0])] == []
    assert [name for name in GRAPH if name in reachable(GRAPH, name)] == []


def test_index_maths_imports_neither_torch_nor_verl() -> None:
    layout = [name for name in GRAPH if name.startswith("verl_pg_plugin.layout")]
    reached = {name: {i.partition(".")[0] for i in reachable(GRAPH, name)} & HEAVY for name in layout}
    assert {name: heavy for name, heavy in reached.items() if heavy} == {}
