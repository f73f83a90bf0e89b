"""What the tests of the doctor share."""

from pathlib import Path

import pytest
import torch

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="asserts what the CPU default reports")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


def broken_plugin(folder: Path, code: str) -> None:
    """An installed plugin of verl's whose module runs ``code`` when it is loaded."""
    metadata = folder / "broken_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nbroken_plugin = broken_plugin\n")
    (folder / "broken_plugin.py").write_text(code)
