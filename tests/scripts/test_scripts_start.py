"""Scripts that no other test runs still find what they import and explain themselves."""

import importlib
import sys

import pytest

sys.path.insert(0, "scripts/upkeep")


@pytest.mark.parametrize(
    "script", ["bench_actor", "bench_longest_prompt", "bench_packing", "plot_steps", "draw_packed_rows"]
)
def test_a_script_finds_what_it_imports(script: str) -> None:
    importlib.import_module(script)
