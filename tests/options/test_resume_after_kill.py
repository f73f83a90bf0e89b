"""Training that was killed with SIGKILL in the middle of a step goes on from its checkpoint bit-equal."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import RankEndedError, on_ranks
from tests.options.harness import Checkpoint
from tests.options.table import SAMPLES
from tests.support import actor_loss, clone, make_engine
from verl_pg_plugin.synthetic import make_batch


def batch_of(rank: int) -> TensorDict:
    return tu.index_select_tensor_dict(make_batch(SAMPLES), list(range(rank, len(SAMPLES), 2)))


def step(engine: Any, rank: int) -> None:
    with engine.train_mode():
        engine.train_batch(batch_of(rank), actor_loss())


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in engine.module.named_parameters()}


def save_and_die(rank: int, path: str, folder: str) -> None:
    engine = make_engine(path, packed=True)
    step(engine, rank)
    engine.save_checkpoint(folder, global_step=1)

    def die(**_: Any) -> tuple[torch.Tensor, dict]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with engine.train_mode():
        engine.train_batch(clone(batch_of(rank)), die)


def run_through_and_resume(rank: int, path: str, folder: str) -> list[dict[str, torch.Tensor]]:
    through, resumed = make_engine(path, packed=True), make_engine(path, packed=True)
    step(through, rank)
    step(through, rank)
    resumed.load_checkpoint(folder)
    step(resumed, rank)
    return [weights(through), weights(resumed)]


@pytest.mark.slow  # a resume without the kill is bit-equal in tests/engine/test_two_ranks.py
def test_weights_after_the_resume_are_those_of_an_uninterrupted_run(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    with pytest.raises(RankEndedError, match="-9"):
        on_ranks(2, save_and_die, checkpoint.model, folder)
    through, resumed = on_ranks(2, run_through_and_resume, checkpoint.model, folder)[0]
    for name, weight in through.items():
        assert torch.equal(resumed[name], weight), name
