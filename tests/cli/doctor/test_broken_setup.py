"""The doctor where the package, or verl, cannot be set up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.doctor.support import CPU_ONLY, ROLLOUT, broken_plugin

pytestmark = CPU_ONLY


def run_module(*overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "verl_pg_plugin", "doctor", *overrides],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


ENGINE_IS_GONE = "import sys; sys.modules['verl_pg_plugin.engine.fsdp_engine'] = None"
OTHER_HOLDS_OUR_KEY = """
from verl.workers.engine.base import BaseEngine, EngineRegistry

@EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")
class OtherEngine(BaseEngine):
    pass
"""


@pytest.mark.parametrize(
    ("startup", "plugin", "platform", "cause", "fix"),
    [
        (
            ENGINE_IS_GONE,
            "",
            "cpu",
            "engines, and verl goes on without: ModuleNotFoundError: import of",
            "correct what",
        ),
        ("", OTHER_HOLDS_OUR_KEY, "nvidia", "broken_plugin.OtherEngine is already registered", "correct what it names"),
        (
            "import sys; sys.modules['verl'] = None",
            "",
            "cpu",
            "import verl fails: ModuleNotFoundError",
            "correct what it names",
        ),
        ("", "", "no_such", "import verl fails: ValueError: Unknown platform 'no_such'", "unset VERL_PLATFORM"),
    ],
    ids=["engine", "registry", "verl", "platform"],
)
def test_what_keeps_the_package_from_registering_is_reported_by_the_command(
    startup: str, plugin: str, platform: str, cause: str, fix: str, tmp_path: Path
) -> None:
    broken_plugin(tmp_path, plugin)
    (tmp_path / "sitecustomize.py").write_text(startup)
    result = run_module(f"{ROLLOUT}.n=4", PYTHONPATH=str(tmp_path), VERL_PLATFORM=platform)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stdout.splitlines()
    (number,) = (number for number, line in enumerate(lines) if line[:1].isdigit() and cause in line)
    assert lines[number + 1].startswith(f"   fix: {fix}")
