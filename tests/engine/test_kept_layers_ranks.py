"""Ranks that keep different numbers of layers wait for each other nowhere and add up to one gradient."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import _init_utils
from verl.utils import tensordict_utils as tu

from tests.engine.carried_cases import ONE_GROUP, carrying, carrying_engine
from tests.engine.ranks import on_ranks
from tests.support import (
    Result,
    actor_loss,
    assert_same,
    clone,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin.synthetic import make_batch

SAMPLES = [*group(14, [5, 3, 8, 2], 1), *group(30, [9, 9], 2)]
ROWS = [[0, 1, 2, 3], [4, 5]]
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2, weights stay gathered": {"engine": {"reshard_after_forward": False}},
    "fsdp": {"strategy": "fsdp", "engine": {"use_orig_params": True}},
    "ulysses": {"engine": {"ulysses_sequence_parallel_size": 2}},
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=3)


@dataclass(frozen=True)
class Kept:
    """What an engine computes, how many layers this rank's micro-batches have kept, and bytes of a row of a layer."""

    result: Result
    layers: frozenset[int] = frozenset()
    held: float = 0.0


def run_engines(rank: int, path: str) -> dict[str, Kept]:
    # FSDP1 refuses to broadcast weights from a CPU, which gloo does all the same.
    _init_utils._check_module_states_for_sync_module_states = lambda states: None
    results = {}
    for name, settings in ENGINES.items():
        settings = {**settings, "engine": {**settings.get("engine", {}), "keep_activations": 1.0}}
        engine = make_engine(path, packed=True, **settings)
        spread = engine.ulysses_sequence_parallel_size > 1
        batch = make_batch(SAMPLES, max_token_len_per_gpu=50)
        if not spread:
            batch = tu.index_select_tensor_dict(batch, ROWS[rank])
        run_engine(engine, clone(batch), actor_loss())
        (held,) = engine.keeper.budget.bytes_per_row.values()
        engine.keeper.budget.asked = 2.5 * held * 31 / 2**30  # of the first group's rows; one layer of the second's
        result = run_engine(engine, clone(batch), actor_loss())
        results[name] = Kept(result, frozenset(len(layers) for layers, _ in engine.keeper.held().kept), held)
    for keep in ("all", "mlp"):
        engine = carrying_engine(path, engine={"ulysses_sequence_parallel_size": 2, "keep_activations": keep})
        with carrying(engine):
            result = run_engine(engine, make_batch(ONE_GROUP, max_token_len_per_gpu=18), actor_loss())
        results[f"chain, {keep}"] = Kept(result)
    results["flat parameters"] = Kept(Result({}, flat_gradients(rank, path, "all")))
    results["flat parameters, mlps kept"] = Kept(Result({}, flat_gradients(rank, path, "mlp")))
    results["flat parameters, recomputed"] = Kept(Result({}, flat_gradients(rank, path, "attention")))
    return results


def flat_gradients(rank: int, path: str, keep: str) -> dict[str, torch.Tensor]:
    """This rank's shards, as FSDP1 holds them."""
    engine = make_engine(path, packed=True, strategy="fsdp", engine={"keep_activations": keep})
    batch = tu.index_select_tensor_dict(make_batch(SAMPLES, max_token_len_per_gpu=50), ROWS[rank])
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, actor_loss())
        return {name: p.grad.clone() for name, p in engine.module.named_parameters()}


@pytest.fixture(scope="module")
def ranks(qwen3: str) -> list[dict[str, Kept]]:
    return on_ranks(2, run_engines, qwen3)


@pytest.mark.parametrize("name", ENGINES)
def test_ranks_that_keep_different_layers_are_exact(ranks: list, qwen3: str, name: str) -> None:
    expected = run_reference(qwen3, make_batch(SAMPLES), actor_loss())
    for rank, results in enumerate(ranks):
        mine = range(len(SAMPLES)) if name == "ulysses" else ROWS[rank]
        outputs = {output: [values[row] for row in mine] for output, values in expected.outputs.items()}
        assert_same(results[name].result, Result(outputs, expected.gradients))
    kept = [results[name].layers for results in ranks]
    assert kept == ([{1}, {1}] if name == "ulysses" else [{2}, {1}])


def test_attentions_output_counts_as_held_where_other_ranks_computed_it(ranks: list) -> None:
    """A recomputed layer holds what its own rank's kernel returned, and not what it was traded for."""
    for results in ranks:
        assert results["ulysses"].held == results["fsdp2"].held + 4 * 8 * 4, "of a row: four heads of eight float32"


def test_flat_parameters_get_the_gradients_of_recomputed_layers(ranks: list) -> None:
    for results in ranks:
        recomputed = results["flat parameters, recomputed"].result.gradients
        assert any(gradient.abs().max() > 0 for gradient in recomputed.values())
        for how in ("", ", mlps kept"):
            kept = results[f"flat parameters{how}"].result.gradients
            assert all(torch.equal(kept[name], want) for name, want in recomputed.items())


@pytest.mark.parametrize("keep", ["all", "mlp"])
def test_parts_of_a_chain_keep_their_layers_on_every_ulysses_rank(ranks: list, qwen3: str, keep: str) -> None:
    expected = run_reference(qwen3, make_batch(ONE_GROUP), actor_loss())
    for results in ranks:
        assert_same(results[f"chain, {keep}"].result, expected)
