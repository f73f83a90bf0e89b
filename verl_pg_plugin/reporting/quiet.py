"""Messages that come in every process, or hundreds of times, and say nothing of the run."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec

__all__ = ["limit_transfer_threads", "pass_over_missing_engines"]

TRANSFER_THREADS = "TQ_NUM_THREADS"


def limit_transfer_threads() -> None:
    """Tell TransferQueue of no more threads than this machine has cores, which is what it falls back to by itself.

    Its default of 8 makes it warn at every transfer of a smaller machine. Processes that Ray starts from here inherit
    the variable; one that is set stays.
    """
    if find_spec("transfer_queue") is None:
        return
    import psutil  # TransferQueue's own requirement

    cores = psutil.cpu_count(logical=False)
    if cores and cores < 8:
        os.environ.setdefault(TRANSFER_THREADS, str(cores))


def pass_over_missing_engines() -> None:
    """Do not show verl's warnings of engines whose packages are missing: five in every process of a run.

    Who chooses a missing engine gets verl's error.
    """
    warnings.filterwarnings("ignore", r"\w+ engine is not available: ModuleNotFoundError", UserWarning)
