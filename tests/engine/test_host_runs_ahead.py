"""The plugin never synchronizes host and device within a mini-batch.

On a CPU, the test watches for what synchronizes a GPU: values read by Python, and operators with a data-dependent size.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.batches import make_batch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.carried_cases import CASES
from tests.engine.test_exactness import MIXED
from tests.support import make_engine, run_engine
from verl_pg_plugin.attention import passes
from verl_pg_plugin.engine import batch
from verl_pg_plugin.engine import engine as engine_module

READS = ("tolist", "cpu", "numpy")  # item, bool and int go through _local_scalar_dense
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "aten::equal")
OURS = Path(passes.__file__).parents[1].as_posix()


class Waits(TorchDispatchMode):
    """Collects the files that synchronize: the innermost frame outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        by_mask = name.startswith("aten::index.") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if by_mask or any(operator in name for operator in OPERATORS):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frames = [frame.filename for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        self.files.append(next(name for name in reversed(frames) if name != __file__))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Watch forward and backward of every micro-batch."""
    watching, run = Waits(), engine_module.run_micro_batch

    def noting(method: Callable) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> Any:
            watching.note()
            return method(*args, **kwargs)

        return noted

    def watched(*args: Any, **kwargs: Any) -> Any:
        reads = {name: noting(getattr(torch.Tensor, name)) for name in READS}
        with watching, patch.multiple(torch.Tensor, **reads):
            return run(*args, **kwargs)

    monkeypatch.setattr(engine_module, "run_micro_batch", watched)
    return watching


@pytest.mark.parametrize("splits", [False, True])
def test_only_verls_loss_synchronizes_in_a_micro_batch(qwen3: str, waits: Waits, splits: bool) -> None:
    """With a whole head, and with a head in chunks and split groups."""
    samples, budget = CASES["one_group_of_8"] if splits else (MIXED, 64)
    engine = make_engine(qwen3, splits=splits, engine={"logits_chunk_size": 2} if splits else {})
    run_engine(engine, make_batch(samples, max_token_len_per_gpu=budget))
    # The CPU kernel is for CPUs only, and the batch is read on the host.
    assert not {name for name in waits.files if name.startswith(OURS)} - {passes.__file__, batch.__file__}
    # The watch detects verl's loss and the CPU kernel.
    assert any("verl/workers/utils" in name for name in waits.files)
    assert passes.__file__ in waits.files
