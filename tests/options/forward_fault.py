"""Loaded by every worker of a run (``VERL_USE_EXTERNAL_MODULES``): rank 1 fails in front of its first forward."""

import os
import time
from pathlib import Path
from typing import Any

from verl_pg_plugin.after_import import after_import

FAULT = "the fault of rank 1"


def _plant() -> None:
    from verl_pg_plugin.engine.sharing_modes import PackedMode

    to_device = PackedMode.to_device

    def failing(self: PackedMode, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK") == "1":
            Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
            raise ZeroDivisionError(FAULT)
        return to_device(self, *args, **kwargs)

    PackedMode.to_device = failing  # type: ignore[method-assign]


after_import("verl_pg_plugin.engine.sharing_modes", _plant)
