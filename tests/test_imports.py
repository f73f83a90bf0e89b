"""The package has no import circle, and index maths stays free of what it need not know."""

from pathlib import Path

import pytest

from tests.imports import circles, import_graph, reachable

PACKAGE = Path(__file__).parents[1] / "verl_pg_plugin"
GRAPH = import_graph(PACKAGE)
INDEX_MATHS = (
    "verl_pg_plugin.layout",
    "verl_pg_plugin.batching",
    "verl_pg_plugin.planning.balance",
    "verl_pg_plugin.planning.sessions",
    "verl_pg_plugin.planning.order",
)


def write_package(root: Path, **sources: str) -> Path:
    package = root / "package"
    for name, source in {"__init__": "", **sources}.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return package


def test_no_module_imports_itself_by_a_detour() -> None:
    found = [" -> ".join(circle) for circle in circles(GRAPH)]
    assert not found, "these modules can only be imported in some orders:\n" + "\n".join(found)


@pytest.mark.parametrize("module", [name for name in GRAPH if name.startswith(INDEX_MATHS)])
def test_index_maths_runs_where_neither_torch_nor_verl_is_installed(module: str) -> None:
    packages = {name.partition(".")[0] for name in reachable(GRAPH, module)}
    assert packages.isdisjoint({"torch", "verl", "transformers", "tensordict", "ray"})


@pytest.mark.parametrize("back", ["from package import a", "from . import a", "def f():\n    from .a import name"])
def test_a_circle_is_found_however_it_closes(back: str, tmp_path: Path) -> None:
    graph = import_graph(write_package(tmp_path, a="import package.b", b=back))
    assert list(circles(graph)) == [["package.a", "package.b", "package.a"]]


def test_a_circle_through_the_init_of_a_package_is_found(tmp_path: Path) -> None:
    sources = {"room/__init__": "from package.room.a import x", "room/a": "import json"}
    assert list(circles(import_graph(write_package(tmp_path, **sources)))) == []
    sources["room/a"] = "from package.room import y"
    graph = import_graph(write_package(tmp_path, **sources))
    assert list(circles(graph)) == [["package.room", "package.room.a", "package.room"]]


def test_types_alone_and_parents_on_the_way_close_no_circle(tmp_path: Path) -> None:
    sources = {
        "a": "from package import b",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.a import x\nelse:\n    import json",
    }
    graph = import_graph(write_package(tmp_path, **sources, __init__="from package import a"))
    assert graph["package.b"] == {"typing", "json"}
    assert list(circles(graph)) == []
