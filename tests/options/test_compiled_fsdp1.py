"""Layers compiled inside FSDP1's flat parameters, on two processes: exact with every option, and runs resume.

The graphs of dynamo run as they are: what it makes of FSDP is what differs, and the rest of the compiler takes
most of the time. A process compiles nothing twice, so all of it is a few calls of the same ranks.
"""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensordict import TensorDict
from torch._dynamo.utils import counters
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from tests.engine.ranks import on_ranks
from tests.engine.test_moe import MODELS
from tests.options.harness import Checkpoint, Engines, assert_exact, by_case, errors_of
from tests.options.option import Case, Option, Place, covering
from tests.options.table import BUDGET, OPTIONS, SAMPLES
from tests.support import (
    Result,
    actor_loss,
    assert_same,
    clone,
    critic_batch,
    fsdp1_takes_models_on_a_cpu,
    group,
    infer,
    make_engine,
    response_values,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin.synthetic import make_batch

COMPILED = Option("compiled layers of FSDP1", "", engine={"strategy": "fsdp", "compile_layers": True})
UNCOMPILED = Option("layers of FSDP1", "", engine={"strategy": "fsdp"})
ELSEWHERE = {"FSDP2 offload policy", "parameter offload"}
"""Of FSDP2 alone, and for GPUs alone: verl puts FSDP1's weights back on a device with a number."""
HERE = [
    option
    for option in OPTIONS
    if not (option.needs_gpu or option.compiles or option.is_default or option.name in ELSEWHERE)
    and option.num_ranks <= 2
]
SEEN = [o for o in HERE if o.meets & {Place.TOKENS, Place.LAYERS, Place.WEIGHTS} and o.name != "LoRA"]
"""By compiled layers, but for adapters, which are refused."""
CASES = [
    *covering([Case((COMPILED, option)) for option in SEEN]),
    *covering([Case((UNCOMPILED, option)) for option in HERE if option not in SEEN]),
]
RAGGED = [[*group(20 + i, [5, 9, 1, 7 + i], i), *group(3 + i, [5, 3], 2), *group(33 - i, [4], 3)] for i in range(3)]
ROWS = [list(range(rank, len(SAMPLES), 2)) for rank in range(2)]


def fsdp1_engine(path: str, packed: bool = True, engine: dict[str, Any] | None = None, **options: Any) -> Any:
    compiled = {"compile_layers": True} if packed else {}
    return make_engine(path, packed=packed, strategy="fsdp", engine={**compiled, **(engine or {})}, **options)


def compiling() -> Any:
    return patch.object(torch, "compile", partial(torch.compile, backend="eager"))


def of_rank(rank: int, batch: TensorDict) -> TensorDict:
    return tu.index_select_tensor_dict(batch, ROWS[rank])


def batch_of() -> TensorDict:
    return make_batch(SAMPLES, max_token_len_per_gpu=BUDGET)


def run_numbers(rank: int, checkpoint: Checkpoint, critic: str) -> tuple[list[int], list[Result], list[str]]:
    """Graphs after each of some ragged batches; a critic and an offloaded reference policy; what is wrong in a case."""
    fsdp1_takes_models_on_a_cpu()
    torch._dynamo.reset()
    counters.clear()
    engines, graphs = Engines(checkpoint), []
    with compiling():
        engine = fsdp1_engine(checkpoint.model)
        for samples in RAGGED:
            run_engine(engine, make_batch(samples, max_token_len_per_gpu=64))
            graphs.append(counters["stats"]["unique_graphs"])
        wrong = errors_of(rank, CASES, lambda case: assert_exact(case, engines))
        of_values = {"engine_cls": EngineRegistry.get_engine_cls("value_model", "fsdp")}
        engine = fsdp1_engine(critic, model={"model_type": "value_model"}, **of_values)
        batch = of_rank(rank, critic_batch(SAMPLES, max_token_len_per_gpu=BUDGET))
        values = run_engine(engine, batch)
        engine = fsdp1_engine(checkpoint.model, engine={"forward_only": True, "model_dtype": "fp32"})
        batch = of_rank(rank, batch_of())
        # An offloaded shard is pinned, which only a device makes sense of.
        with patch.object(torch.Tensor, "pin_memory", lambda self: self):
            log_probs = infer(engine, batch)["model_output"]["log_probs"]
    frames = counters["frames"]
    assert frames["total"] == frames["ok"], f"torch ran some of {frames['total']} frames uncompiled"
    return graphs, [values, Result({"log_probs": response_values(log_probs, batch)}, {})], wrong


@pytest.fixture(scope="module")
def numbers(checkpoint: Checkpoint, value_model: str) -> list[tuple[list[int], list[Result], list[str]]]:
    return on_ranks(2, run_numbers, checkpoint, value_model)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_layers_of_flat_parameters_keep_the_numbers_of_every_option(case: Case, numbers: list) -> None:
    errors = by_case(CASES, [wrong for _, _, wrong in numbers])
    assert not errors[str(case)], errors[str(case)]


def test_ragged_micro_batches_compile_once_under_fsdp1_too(numbers: list) -> None:
    for (first, *later), _, _ in numbers:
        assert first > 0, "nothing was compiled"
        assert set(later) == {first}


def test_compiled_critics_and_reference_policies_keep_their_numbers(
    checkpoint: Checkpoint, value_model: str, numbers: list
) -> None:
    values = run_reference(value_model, critic_batch(SAMPLES))
    policy = Result({"log_probs": run_reference(checkpoint.model, batch_of()).outputs["log_probs"]}, {})
    for rows, (_, models, _) in zip(ROWS, numbers, strict=True):
        for found, expected in zip(models, (values, policy), strict=True):
            assert_same(found, expected.of_rank(rows))


def run_experts(rank: int, path: str) -> Result:
    fsdp1_takes_models_on_a_cpu()
    # The implementation that torch compiles whole on a CPU.
    override = {"attn_implementation": "sdpa", "_experts_implementation": "batched_mm"}
    with compiling():
        engine = fsdp1_engine(path, model={"override_config": override})
        return run_engine(engine, of_rank(rank, batch_of()))


@pytest.mark.slow
def test_compiled_experts_of_flat_parameters_keep_their_numbers(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3_moe", **MODELS["qwen3_moe"])
    expected = run_reference(path, batch_of())
    for rows, result in zip(ROWS, on_ranks(2, run_experts, path), strict=True):
        assert_same(result, expected.of_rank(rows))


def state_of(engine: Any) -> list[torch.Tensor]:
    """Copies of this rank's shards of weights and of the optimizer's moments, in the order of the model."""
    moments = [engine.optimizer.state[p] for p in engine.module.parameters()]
    state = [*engine.module.parameters(), *(of[name] for of in moments for name in ("exp_avg", "exp_avg_sq", "step"))]
    return [tensor.detach().clone() for tensor in state]


def run_resumes(rank: int, path: str, folder: str) -> dict[tuple[bool, bool], list[list[torch.Tensor]]]:
    """By the modes that save and load: the state saved, that loaded, those one step on, uninterrupted and resumed."""
    fsdp1_takes_models_on_a_cpu()
    rows, found = of_rank(rank, batch_of()), {}

    def step(engine: Any) -> list[torch.Tensor]:
        with engine.train_mode():
            engine.train_batch(clone(rows), actor_loss())
        return state_of(engine)

    # verl names the device of a checkpoint's weights with its number, and a CPU has none.
    with compiling(), patch.object(transformer_impl, "load_fsdp_model_to_gpu", lambda module: None):
        for saves in (True, False):
            through = fsdp1_engine(path, packed=saves)
            saved = step(through)
            through.save_checkpoint(f"{folder}/{saves}", global_step=1)
            later = step(through)
            for loads in (True, False):
                resumed = fsdp1_engine(path, packed=loads)
                resumed.load_checkpoint(f"{folder}/{saves}")
                found[saves, loads] = [saved, state_of(resumed), later, step(resumed)]
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
