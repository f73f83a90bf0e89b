"""Layers compiled inside FSDP1's flat parameters, on two processes; tests/options/test_ranks.py has every option."""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import check_exact_on_ranks, graphs_as_they_are, on_ranks
from tests.engine.test_exactness import EXPERTS
from tests.options.harness import Checkpoint
from tests.options.table import BUDGET, SAMPLES
from tests.support import (
    Result,
    assert_same,
    critic_batch,
    fsdp1_takes_models_on_a_cpu,
    group,
    make_engine,
    old_outputs,
    run_reference,
    save_tiny_model,
    update,
)
from verl_pg_plugin.synthetic import make_batch

RAGGED = [[*group(20 + i, [5, 9, 1, 7 + i], i), *group(3 + i, [5, 3], 2), *group(33 - i, [4], 3)] for i in range(3)]
ROWS = [list(range(rank, len(SAMPLES), 2)) for rank in range(2)]
COMPILED = {"strategy": "fsdp", "engine": {"compile_layers": True}}


def check_on_rank(rank: int, path: str) -> None:
    """Ragged batches make no further graphs, and an offloaded reference policy keeps its numbers."""
    fsdp1_takes_models_on_a_cpu()
    torch._dynamo.reset()
    counters.clear()
    with graphs_as_they_are():
        engine, graphs = make_engine(path, **COMPILED), []
        for samples in RAGGED:
            update(engine, make_batch(samples, max_token_len_per_gpu=64))
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[0] > 0, "nothing was compiled"
        assert set(graphs) == {graphs[0]}
        reference = {"forward_only": True, "model_dtype": "fp32", "compile_layers": True}
        engine, batch = make_engine(path, strategy="fsdp", engine=reference), make_batch(SAMPLES)
        # An offloaded shard is pinned, which only a device makes sense of.
        with patch.object(torch.Tensor, "pin_memory", lambda self: self):
            found = old_outputs(engine, tu.index_select_tensor_dict(batch, ROWS[rank]))
    assert_same(Result(found, {}), Result(run_reference(path, batch).of_rank(ROWS[rank]).outputs, {}))


def test_ragged_micro_batches_compile_once_and_reference_policies_keep_their_numbers(checkpoint: Checkpoint) -> None:
    on_ranks(2, check_on_rank, checkpoint.model)


def test_compiled_critics_keep_their_numbers(value_model: str) -> None:
    make = partial(critic_batch, SAMPLES, max_token_len_per_gpu=BUDGET)
    check_exact_on_ranks(value_model, make, ROWS, critic=True, **COMPILED)


@pytest.mark.slow
def test_compiled_experts_of_flat_parameters_keep_their_numbers(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3_moe", **EXPERTS["qwen3_moe"])
    # The implementation that torch compiles whole on a CPU.
    override = {"attn_implementation": "sdpa", "_experts_implementation": "batched_mm"}
    make = partial(make_batch, SAMPLES, max_token_len_per_gpu=BUDGET)
    check_exact_on_ranks(path, make, ROWS, model={"override_config": override}, **COMPILED)
