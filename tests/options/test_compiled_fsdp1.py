"""Layers compiled inside FSDP1's flat parameters, on two processes: exact with every option, and runs resume.

The compiler stops in front of Inductor, which takes most of the time and sees nothing of FSDP. What ran in one process
is not compiled again, so all of it is two calls of the ranks.
"""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensordict import TensorDict
from torch._dynamo.utils import counters
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry

from tests.engine.ranks import on_ranks
from tests.engine.test_moe import MODELS
from tests.engine.value_models import critic_batch, critic_loss, run_value_reference, save_value_model
from tests.options.harness import Checkpoint, Engines, assert_exact, by_case, errors_of, of_rows
from tests.options.option import Case, Option, Place, alone, covering
from tests.options.table import BUDGET, OPTIONS, SAMPLES, case_of
from tests.support import (
    Result,
    actor_loss,
    assert_same,
    clone,
    fsdp1_takes_models_on_a_cpu,
    group,
    make_engine,
    response_values,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin.synthetic import Sample, make_batch

FSDP1 = Option("compiled layers of FSDP1", "", {Place.WEIGHTS}, engine={"strategy": "fsdp", "compile_layers": True})
UNCOMPILED = Option("layers of FSDP1", "", engine={"strategy": "fsdp"})
ELSEWHERE = {"LoRA", "FSDP2 offload policy"}
WITH = [
    Case((FSDP1, *case.options))
    for case in alone(o for o in OPTIONS if not (o.needs_gpu or o.compiles or o.is_default or o.name in ELSEWHERE))
    if case.num_ranks <= 2
]
CASES = [*covering(WITH), Case((UNCOMPILED, *case_of("LoRA").options))]
RAGGED = [[*group(20 + i, [5, 9, 1, 7 + i], i), *group(3 + i, [5, 3], 2), *group(33 - i, [4], 3)] for i in range(3)]
ROWS = [list(range(rank, len(SAMPLES), 2)) for rank in range(2)]


def fsdp1_engine(path: str, packed: bool = True, engine: dict[str, Any] | None = None, **options: Any) -> Any:
    compiled = {"compile_layers": True} if packed else {}
    return make_engine(path, packed=packed, strategy="fsdp", engine={**compiled, **(engine or {})}, **options)


def of_rank(rank: int, batch: TensorDict) -> TensorDict:
    return tu.index_select_tensor_dict(batch, ROWS[rank])


def batch_of(samples: list[Sample] = SAMPLES) -> TensorDict:
    return make_batch(samples, max_token_len_per_gpu=BUDGET)


# --- Numbers -------------------------------------------------------------------------------------------------------


def run_models(rank: int, paths: dict[str, str]) -> dict[str, Result]:
    """A critic, experts and an offloaded reference policy, each with every second sequence."""
    values = {"model_type": "value_model"}, EngineRegistry.get_engine_cls("value_model", "fsdp")
    critic = fsdp1_engine(paths["critic"], model=values[0], engine_cls=values[1])
    critic_rows = of_rank(rank, critic_batch(SAMPLES, max_token_len_per_gpu=BUDGET))
    reference = fsdp1_engine(paths["reference"], engine={"forward_only": True, "model_dtype": "fp32"})
    # The implementation of experts that torch compiles whole on a CPU.
    override = {"attn_implementation": "sdpa", "_experts_implementation": "batched_mm"}
    experts = fsdp1_engine(paths["experts"], model={"override_config": override})
    rows = of_rank(rank, batch_of())
    # An offloaded shard is pinned, which only a device makes sense of.
    with reference.eval_mode(), patch.object(torch.Tensor, "pin_memory", lambda self: self):
        log_probs = reference.infer_batch(clone(rows))["model_output"]["log_probs"]
    return {
        "critic": run_engine(critic, critic_rows, critic_loss()),
        "experts": run_engine(experts, rows, actor_loss()),
        "reference": Result({"log_probs": response_values(log_probs, rows)}, {}),
    }


def graphs_of(path: str) -> list[int]:
    """Graphs so far, after an update on each of some ragged batches."""
    engine, found = fsdp1_engine(path), []
    for samples in RAGGED:
        with engine.train_mode():
            engine.forward_backward_batch(make_batch(samples, max_token_len_per_gpu=64), actor_loss())
            engine.optimizer_zero_grad()
        found.append(counters["stats"]["unique_graphs"])
    return found


def run_numbers(rank: int, checkpoint: Checkpoint, paths: dict[str, str]) -> tuple[list[int], Any, list[str]]:
    fsdp1_takes_models_on_a_cpu()
    torch._dynamo.reset()
    counters.clear()
    engines = Engines(checkpoint)
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        graphs = graphs_of(checkpoint.model)
        cases = errors_of(rank, CASES, lambda case: assert_exact(case, engines))
        models = run_models(rank, paths)
    frames = counters["frames"]
    assert frames["total"] == frames["ok"], f"torch ran some of {frames['total']} frames uncompiled"
    return graphs, models, cases


@pytest.fixture(scope="module")
def paths(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "critic": save_value_model(folder / "critic"),
        "experts": save_tiny_model(folder / "experts", "qwen3_moe", **MODELS["qwen3_moe"]),
        "reference": checkpoint.model,
    }


@pytest.fixture(scope="module")
def numbers(checkpoint: Checkpoint, paths: dict[str, str]) -> list[tuple[list[int], Any, list[str]]]:
    return on_ranks(2, run_numbers, checkpoint, paths)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_layers_of_flat_parameters_keep_the_numbers_of_every_option(case: Case, numbers: list) -> None:
    errors = by_case(CASES, [of_cases for _, _, of_cases in numbers])
    assert not errors[str(case)], errors[str(case)]


def test_ragged_micro_batches_compile_once_under_fsdp1_too(numbers: list) -> None:
    for (first, *later), _, _ in numbers:
        assert first > 0, "nothing was compiled"
        assert set(later) == {first}


@pytest.mark.parametrize("model", ["critic", "experts", "reference"])
def test_compiled_layers_of_flat_parameters_keep_numbers_of(model: str, paths: dict[str, str], numbers: list) -> None:
    if model == "critic":
        expected = run_value_reference(paths[model], critic_batch(SAMPLES))
    else:
        expected = run_reference(paths[model], batch_of(), actor_loss())
    if model == "reference":
        expected = Result({"log_probs": expected.outputs["log_probs"]}, {})
    for rows, (_, models, _) in zip(ROWS, numbers, strict=True):
        assert_same(models[model], Result(of_rows(expected, rows).outputs, expected.gradients))


# --- Resuming ------------------------------------------------------------------------------------------------------


def state_of(engine: Any) -> list[torch.Tensor]:
    """This rank's shards of weights and of the optimizer's moments, in the order of the model."""
    moments = [engine.optimizer.state[p] for p in engine.module.parameters()]
    return [*engine.module.parameters(), *(of[name] for of in moments for name in ("exp_avg", "exp_avg_sq", "step"))]


def run_resumes(rank: int, path: str, folder: str) -> dict[tuple[bool, bool], list[list[torch.Tensor]]]:
    """By the modes that save and load: the state saved, that loaded, those one step on, uninterrupted and resumed."""
    fsdp1_takes_models_on_a_cpu()
    rows, found = of_rank(rank, batch_of()), {}

    def step(engine: Any) -> None:
        with engine.train_mode():
            engine.train_batch(clone(rows), actor_loss())

    def copied(engine: Any) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in state_of(engine)]

    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        for saves in (True, False):
            through = fsdp1_engine(path, packed=saves)
            step(through)
            through.save_checkpoint(f"{folder}/{saves}", global_step=1)
            saved = copied(through)
            step(through)
            for loads in (True, False):
                resumed = fsdp1_engine(path, packed=loads)
                resumed.load_checkpoint(f"{folder}/{saves}")
                found[saves, loads] = [saved, copied(resumed), copied(through)]
                step(resumed)
                found[saves, loads].append(copied(resumed))
    return found


@pytest.fixture(scope="module")
def resumes(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return on_ranks(2, run_resumes, checkpoint.model, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("loads", [True, False], ids=["into packed", "into stock"])
@pytest.mark.parametrize("saves", [True, False], ids=["packed", "stock"])
def test_runs_under_fsdp1_resume_with_the_mode_toggled(saves: bool, loads: bool, resumes: list[dict]) -> None:
    """Weights and the optimizer's state."""
    for of_rank in resumes:
        saved, loaded, through, resumed = of_rank[saves, loads]
        assert all(map(torch.equal, saved, loaded))
        for got, want in zip(resumed, through, strict=True):
            if saves == loads:
                assert torch.equal(got, want)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
