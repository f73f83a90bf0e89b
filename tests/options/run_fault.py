"""Loaded by every worker of a run (``VERL_USE_EXTERNAL_MODULES``): rank 1 fails where ``FAULT_PLACE`` says.

In front of its first forward, or inside the first layer's attention there, or inside the last layer's in its backward.
"""

import importlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from verl_pg_plugin.after_import import after_import

FAULT = "the fault of rank 1"
PLACES = {
    "in front of a forward": ("verl_pg_plugin.engine.engine", "on_device"),
    "forward": ("verl_pg_plugin.attention.op", "_forward"),
    "backward": ("verl_pg_plugin.attention.op", "_backward"),
}


def _plant(module_name: str, name: str) -> None:
    module: Any = importlib.import_module(module_name)
    function = getattr(module, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK") == "1":
            Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
            raise ZeroDivisionError(FAULT)
        return function(*args, **kwargs)

    setattr(module, name, failing)


if "FAULT_PLACE" in os.environ:  # in a worker, and not in the test that starts it
    _chosen = PLACES[os.environ["FAULT_PLACE"]]
    after_import(_chosen[0], partial(_plant, *_chosen))
