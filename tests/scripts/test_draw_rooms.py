"""The picture of the rooms in docs/design.md shows the imports as they are."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/upkeep/draw_rooms.py"


def test_the_picture_in_the_documents_is_not_stale() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
