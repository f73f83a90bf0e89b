"""What fails on one of two ranks ends the step on both, with the cause, and the next step is exact."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from tensordict import TensorDict
from torch.distributed.fsdp import _init_utils
from verl.utils import tensordict_utils as tu
from verl.utils.activation_offload import SynchronizedGroupOffloadHandler

from tests.engine.carried_cases import ONE_GROUP, carrying_engine
from tests.engine.ranks import on_ranks
from tests.support import Result, actor_loss, assert_same, clone, group, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.engine import shared_prefix_engine
from verl_pg_plugin.engine.batch import micro_batch_plan
from verl_pg_plugin.engine.batch.micro_batch_plan import plan_micro_batches
from verl_pg_plugin.engine.batch.row_selection import RowSelector
from verl_pg_plugin.engine.device_memory import DeviceMemory
from verl_pg_plugin.engine.forward_rows import ForwardRows
from verl_pg_plugin.engine.ranks import RankError
from verl_pg_plugin.engine.shared_model import SharedModel
from verl_pg_plugin.engine.sharing_modes import PackedMode
from verl_pg_plugin.engine.steps import verify
from verl_pg_plugin.engine.steps.carry import Carrier
from verl_pg_plugin.synthetic import make_batch

SMALL_GROUPS = [*group(6, [7, 1], 3), *group(9, [4, 4], 2), *group(5, [9, 8], 5), *group(7, [3, 6], 6)]
SAMPLES = [*ONE_GROUP, *SMALL_GROUPS]
ALL = list(range(len(SAMPLES)))
ROWS = [ALL[8:], ALL[:8]]  # of each rank
MOST_SECONDS = 30

# What fails on rank 1, which has a chain, outside the model's forward and backward: in front of them and behind.
FAULTS: dict[str, tuple[Any, str]] = {
    "the batch": (PackedMode, "check_batch"),
    "reading the plan": (PackedMode, "read"),
    "the limits of a micro-batch": (micro_batch_plan, "limits_of"),
    "cutting it": (micro_batch_plan, "_cut"),
    "laying it out": (PackedMode, "lay_out"),
    "its order among those of all ranks": (micro_batch_plan, "align"),
    "picking its rows": (RowSelector, "select"),
    "a micro-batch on its way to the device": (shared_prefix_engine, "on_device"),
    "rows of a chain": (Carrier, "carrying"),
    "inputs of a forward": (ForwardRows, "model_inputs"),
    "outputs of a forward, in front of its backward": (SharedModel, "check_every_layer_mixed"),
    "a comparison of verify mode": (verify, "compare"),
    "what was carried": (Carrier, "check_all_claimed"),
    "metrics": (shared_prefix_engine, "figures_of_rank"),
    "metrics of all ranks": (shared_prefix_engine, "plan_metrics"),
    "free memory": (DeviceMemory, "read"),
}
LOSSES = {"the first loss": 0, "a loss inside the chain": 1, "the last loss": -1}
METRICS_OF_A_LOSS = "metrics of the losses, joined behind the last backward"
# A forward whose backward never comes, and one that never begins.
AROUND_A_FORWARD = ["rows of a chain", "inputs of a forward", "outputs of a forward, in front of its backward"]


@dataclass(frozen=True)
class Setting:
    """Engines, and what fails there."""

    faults: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    forward_only: bool = False
    share_sequences: bool = False


VERIFIED = {"verify": "every_n", "verify_every": 2}  # ranks that counted differently would verify alone
SETTINGS = {
    "FSDP2": Setting(
        [*(fault for fault in FAULTS if fault != "free memory"), *LOSSES, METRICS_OF_A_LOSS], {"engine": VERIFIED}
    ),
    "log-probs": Setting(
        [*AROUND_A_FORWARD, "a comparison of verify mode", "metrics"], {"engine": VERIFIED}, forward_only=True
    ),
    "FSDP1": Setting(
        [*AROUND_A_FORWARD, "a loss inside the chain"], {"strategy": "fsdp", "engine": {"use_orig_params": True}}
    ),
    "Ulysses": Setting(
        [*AROUND_A_FORWARD, "a comparison of verify mode", "the last loss"],
        {"engine": {"ulysses_sequence_parallel_size": 2, **VERIFIED}},
        share_sequences=True,
    ),
    "activations offloaded": Setting(
        [*AROUND_A_FORWARD, "a loss inside the chain"], {"model": {"enable_activation_offload": True}}
    ),
    "layers kept": Setting(
        [*AROUND_A_FORWARD, "a loss inside the chain", "free memory"],
        {"engine": {"keep_activations": "all", "reshard_after_forward": False}},
    ),
}


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("the fault of rank 1")


class BrokenMetrics(dict):
    items = fail


def broken_loss(fault: str, num_micro_batches: int) -> Callable[..., Any]:
    """Raises on one micro-batch, or returns metrics that nobody can read."""
    loss, calls = actor_loss(), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if fault in LOSSES and len(calls) - 1 == LOSSES[fault] % num_micro_batches:
            fail()
        value, metrics = loss(*args, **kwargs)
        return value, metrics if fault in LOSSES else BrokenMetrics(metrics)

    return broken


def told(engine: Any, batch: TensorDict, loss: Callable[..., Any] | None) -> tuple[str, float]:
    """How an update of ``batch``, or its log-probs, end, and after how many seconds."""
    start = time.monotonic()
    engine.optimizer_zero_grad()
    mode = engine.eval_mode() if loss is None else engine.train_mode()
    with pytest.raises((ZeroDivisionError, RankError)) as caught, mode:
        engine.forward_backward_batch(clone(batch), loss, forward_only=loss is None)
    assert engine.carrier is None
    assert engine.meetings is None
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - start


def run_settings(rank: int, path: str) -> dict[tuple[str, str], tuple[str, float, Result]]:
    """How a step with each fault ended on this rank, and the step after it, by setting and fault."""
    # FSDP1 refuses to broadcast weights from a CPU, which gloo does all the same. No GPU, no pinned memory.
    _init_utils._check_module_states_for_sync_module_states = lambda states: None
    SynchronizedGroupOffloadHandler.offload = staticmethod(
        partial(SynchronizedGroupOffloadHandler.offload, pin_memory=False)
    )
    return {
        (name, fault): ended
        for name, setting in SETTINGS.items()
        for fault, ended in run_faults(rank, path, setting).items()
    }


def rows_of(rank: int, setting: Setting) -> list[int]:
    return ALL if setting.share_sequences else ROWS[rank]


def run_faults(rank: int, path: str, setting: Setting) -> dict[str, tuple[str, float, Result]]:
    engine = carrying_engine(path, **setting.options)
    sp_size = engine.ulysses_sequence_parallel_size
    batch = make_batch(SAMPLES, max_token_len_per_gpu=36 // sp_size)
    batch = tu.index_select_tensor_dict(batch, rows_of(rank, setting))
    plan = plan_micro_batches(
        clone(batch), engine.get_data_parallel_group(), sp_size, engine.sharing, carry=engine._carry_policy(False)
    )
    assert bool(plan.chains) == (rank == 1 or setting.share_sequences), "a chain on one rank alone"
    assert len(plan.micro_batches) > 2
    results = {}
    for fault in setting.faults:
        loss = None if setting.forward_only else actor_loss()
        with patch.object(*FAULTS[fault], fail) if rank == 1 and fault in FAULTS else nullcontext():
            if rank == 1 and fault not in FAULTS:
                loss = broken_loss(fault, len(plan.micro_batches))
            ended = told(engine, batch, loss)
        results[fault] = (*ended, run_engine(engine, clone(batch), actor_loss()))
    return results


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=3)  # verl offloads no fewer


@pytest.fixture(scope="module")
def ranks(qwen3: str) -> list[dict[tuple[str, str], tuple[str, float, Result]]]:
    return on_ranks(2, run_settings, qwen3)


@pytest.fixture(scope="module")
def expected(qwen3: str) -> Result:
    return run_reference(qwen3, make_batch(SAMPLES), actor_loss())


@pytest.mark.parametrize(
    ("setting", "fault"), [(name, fault) for name, setting in SETTINGS.items() for fault in setting.faults]
)
def test_both_ranks_stop_with_the_cause_and_the_next_step_is_exact(
    ranks: list, expected: Result, setting: str, fault: str
) -> None:
    (message, seconds, _), (cause, others_seconds, _) = (rank[setting, fault] for rank in ranks)
    assert cause == "ZeroDivisionError: the fault of rank 1"
    assert message == f"RankError: rank 1: {cause}"
    assert max(seconds, others_seconds) < MOST_SECONDS
    for rank, results in enumerate(ranks):
        rows = rows_of(rank, SETTINGS[setting])
        outputs = {name: [values[i] for i in rows] for name, values in expected.outputs.items()}
        assert_same(results[setting, fault][2], Result(outputs, expected.gradients))
