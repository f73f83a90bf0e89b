"""Runs on two processes resume from a checkpoint of either mode in either mode, bit by bit where it is the same."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from tests.engine.ranks import graphs_as_they_are, on_ranks
from tests.engine.test_exactness import MIXED
from tests.support import actor_loss, clone, fsdp1_takes_models_on_a_cpu, make_engine
from verl_pg_plugin.synthetic import make_batch

State = list[torch.Tensor]


def state_of(engine: Any) -> State:
    """Copies of this rank's shards of weights and of the optimizer's moments, in the order of the model."""
    moments = [engine.optimizer.state[p] for p in engine.module.parameters()]
    state = [*engine.module.parameters(), *(of[name] for of in moments for name in ("exp_avg", "exp_avg_sq", "step"))]
    return [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in state]


def run_on_rank(rank: int, path: str, strategy: str, folder: str) -> dict[tuple[bool, bool], list[State]]:
    """By the modes that save and load: the state saved, that loaded, those one step on, uninterrupted and resumed."""
    fsdp1_takes_models_on_a_cpu()
    rows, found = tu.index_select_tensor_dict(make_batch(MIXED), list(range(rank, len(MIXED), 2))), {}

    def build(packed: bool) -> Any:
        compiled = packed and strategy == "fsdp"  # inside flat parameters
        return make_engine(path, packed=packed, strategy=strategy, engine={"compile_layers": True} if compiled else {})

    def step(engine: Any) -> State:
        with engine.train_mode():
            engine.train_batch(clone(rows), actor_loss())
        return state_of(engine)

    # verl names the device of a checkpoint's weights with its number, and a CPU has none.
    on_cpu = patch.object(transformer_impl, "load_fsdp_model_to_gpu", lambda module: None)
    with graphs_as_they_are(), on_cpu:
        for saves in (True, False):
            through = build(saves)
            saved = step(through)
            through.save_checkpoint(f"{folder}/{saves}", global_step=1)
            later = step(through)
            for loads in (True, False):
                resumed = build(loads)
                resumed.load_checkpoint(f"{folder}/{saves}")
                found[saves, loads] = [saved, state_of(resumed), later, step(resumed)]
    return found


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_runs_resume_with_the_mode_toggled(qwen3: str, strategy: str, tmp_path: Path) -> None:
    """Weights and the optimizer's state."""
    for of_rank in on_ranks(2, run_on_rank, qwen3, strategy, str(tmp_path)):
        for (saves, loads), (saved, loaded, through, resumed) in of_rank.items():
            assert all(map(torch.equal, saved, loaded))
            for got, want in zip(resumed, through, strict=True):
                if saves == loads:
                    assert torch.equal(got, want)
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
