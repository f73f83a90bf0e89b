"""The configuration can be read where torch is slow to load or not there at all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "torch.distributed", "transformers", "verl", "ray", "verl_pg_plugin.engine", "verl_pg_plugin.plugin")


def loaded_by(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(result.stdout))


@pytest.mark.parametrize(
    "statement",
    [
        "import verl_pg_plugin",
        "import verl_pg_plugin.config",
        "from verl_pg_plugin.config import Mode, PrefixGrouperOptions, mode_of; PrefixGrouperOptions()",
    ],
)
def test_import_loads_no_torch_no_transformers_no_verl_and_no_engine(statement):
    assert not loaded_by(statement) & set(HEAVY)
