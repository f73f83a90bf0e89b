"""Scripts that no other test runs still find what they import and explain themselves."""

import importlib

import pytest


@pytest.mark.parametrize("script", ["bench_actor", "bench_longest_prompt", "bench_packing", "draw_figures"])
def test_a_script_finds_what_it_imports(script: str) -> None:
    importlib.import_module(script)
