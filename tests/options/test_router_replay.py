"""Router replay on verl's VeOmni engine: tokens are shared only if their experts are equal too.

The reference is transformers' model on single sequences, with patched routers that take the same experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.batches import Sample, make_batch
from tensordict import TensorDict
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from verl.utils import tensordict_utils as tu
from verl.workers.config.engine import EngineRouterReplayConfig

from tests.architectures.tiny_configs import save_causal
from tests.engine.ranks import on_ranks
from tests.options.table import SAMPLES
from tests.options.test_veomni import INSTALLED, pytestmark  # noqa: F401
from tests.support import (
    Result,
    assert_same,
    check_exact,
    infer,
    jagged,
    make_engine,
    old_outputs,
    run_reference,
    update,
)
from verl_pg_plugin.issue import BatchError

LAYERS, EXPERTS, PER_TOKEN = 2, 8, 2
CUTS = {"whole groups": 90, "split groups": 38}


def routes_of_rollouts(batch: TensorDict, gaps: bool = True) -> torch.Tensor:
    """Random experts, the same for equal prompts; some tokens have other experts or, with ``gaps``, none (zeros)."""

    def draw(seed: int, num_tokens: int) -> torch.Tensor:
        scores = torch.rand(num_tokens, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
        return scores.topk(PER_TOKEN).indices

    routes = []
    for i, (ids, prompt) in enumerate(zip(batch["input_ids"].unbind(), batch["prompts"].unbind(), strict=True)):
        routes.append(torch.cat([draw(int(prompt.sum()), len(prompt)), draw(1000 + i, len(ids) - len(prompt))]))
        routes[i][-1] = 0
    routes[1][3, 1] = (routes[1][3, 1] + 1) % EXPERTS
    if gaps:
        routes[2][4] = 0
    return torch.nested.as_nested_tensor(routes, layout=torch.jagged)


@contextmanager
def routed(routes: torch.Tensor) -> Iterator[None]:
    """Patch transformers' routers, called sequence by sequence, to take these experts."""
    calls, of_sequences = count(), routes.unbind()

    def forward(router: Qwen3MoeTopKRouter, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sequence, layer = divmod(next(calls), LAYERS)
        logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
        wanted, scores = of_sequences[sequence][:, layer].long(), logits.softmax(-1)
        taken = torch.where(wanted[:, :1] == wanted[:, 1:], scores.topk(PER_TOKEN).indices, wanted)
        weights = scores.gather(1, taken)
        return logits, weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, taken

    with patch.object(Qwen3MoeTopKRouter, "forward", forward):
        yield


def reference(path: str, batch: TensorDict, loss: Callable | None = None) -> Result:
    with routed(batch["routed_experts"]):
        return run_reference(path, batch, loss)


def routes_of_all_ranks(recorded: torch.Tensor, ulysses: int) -> torch.Tensor:
    """Return the experts that all data-parallel ranks recorded, each for its own sequences in their order."""
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [row.to("cpu", copy=True) for row in recorded.unbind()])
    return jagged(row for of_rank in of_ranks[::ulysses] for row in of_rank)


def check_replay(rank: int, path: str, ulysses: int) -> dict[str, list[float]]:
    """Return the tokens that R3 and R2 compute in an update, by name of the cut."""
    from veomni.distributed.parallel_state import clear_parallel_state

    clear_parallel_state()
    computed, engines = {}, {}
    for mode in ("R3", "R2"):
        options = {"ulysses_parallel_size": ulysses, "router_replay": EngineRouterReplayConfig(mode=mode)}
        engines[mode] = make_engine(path, strategy="veomni", splits=True, engine={**options, "verify": "first"})
    engine = engines["R2"]
    mine = torch.arange(len(SAMPLES)).tensor_split(engine.get_data_parallel_size())[engine.get_data_parallel_rank()]
    mine = mine.tolist()
    for name, budget in CUTS.items():
        batch = make_batch(SAMPLES, max_token_len_per_gpu=-(-budget // ulysses), enable_routing_replay=True)
        batch["routed_experts"] = routes_of_rollouts(batch)
        splits, expected = name == "split groups", reference(path, batch)
        got = check_exact(engines["R3"], path, batch, sequences=mine, splits=splits, expected=expected)
        computed[name] = got.metrics["prefix_grouper/computed_tokens"]

        own = tu.index_select_tensor_dict(batch.exclude("routed_experts"), mine)
        recording = infer(engine, own)
        recorded = recording["model_output"].pop("routed_experts")
        assert recorded.dtype == torch.int16
        tu.assign_non_tensor(plain := own.copy(), enable_routing_replay=False)
        as_ever = infer(engine, plain)
        for figure in ("computed_tokens", "dedup_ratio_of_groups", "groups_per_micro_batch"):
            assert recording["metrics"][f"prefix_grouper/{figure}"] == as_ever["metrics"][f"prefix_grouper/{figure}"]
        for output, values in as_ever["model_output"].items():
            assert torch.equal(recording["model_output"][output].values(), values.values())
        own["routed_experts"] = recorded
        batch["routed_experts"] = routes_of_all_ranks(recorded, ulysses)
        expected = reference(path, batch).of_rank(mine)
        got = update(engine, own, return_model_output=True)
        outputs = old_outputs(engine, own)
        del outputs["routed_experts"]
        assert_same(got, expected)
        assert_same(replace(got, outputs=outputs), expected)
        computed[name] += got.metrics["prefix_grouper/computed_tokens"]
    empty_response = make_batch([Sample([3, 4, 5], []), Sample([3, 4, 5], [6])], enable_routing_replay=True)
    with pytest.raises(BatchError, match="sequence 0 has an empty response"):
        infer(engine, empty_response)
    return computed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ulysses", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_router_replay_is_exact_and_shares_tokens_with_equal_experts(tmp_path: Path, ulysses: int) -> None:
    path = save_causal(tmp_path, "qwen3_moe")
    for computed in on_ranks(2, check_replay, path, ulysses, folder=INSTALLED):
        for rollouts, recorded in computed.values():
            assert rollouts > recorded
