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


def run_on_rank(rank: int, path: str) -> tuple[list[int], Result]:
    """Graphs after each of some ragged batches, and the log-probs of an offloaded reference policy."""
    fsdp1_takes_models_on_a_cpu()
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    with graphs_as_they_are():
        engine = make_engine(path, **COMPILED)
        for samples in RAGGED:
            update(engine, make_batch(samples, max_token_len_per_gpu=64))
            graphs.append(counters["stats"]["unique_graphs"])
        engine = make_engine(path, strategy="fsdp", engine={"forward_only": True, "model_dtype": "fp32"})
        batch = tu.index_select_tensor_dict(make_batch(SAMPLES, max_token_len_per_gpu=BUDGET), ROWS[rank])
        # An offloaded shard is pinned, which only a device makes sense of.
        with patch.object(torch.Tensor, "pin_memory", lambda self: self):
            return graphs, Result(old_outputs(engine, batch), {})


def test_ragged_micro_batches_compile_once_and_reference_policies_keep_their_numbers(checkpoint: Checkpoint) -> None:
    expected = run_reference(checkpoint.model, make_batch(SAMPLES))
    for rows, ((first, *later), found) in zip(ROWS, on_ranks(2, run_on_rank, checkpoint.model), strict=True):
        assert first > 0, "nothing was compiled"
        assert set(later) == {first}
        assert_same(found, Result(expected.of_rank(rows).outputs, {}))


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
