"""Metrics of a mini-batch: token counts, FLOPs, memory, and loss means over all tokens."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.batches import make_batch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics
from verl.workers.config import PolicyLossConfig
from verl.workers.config.actor import RolloutCorrectionConfig

from tests.engine.ranks import on_ranks
from tests.support import actor_loss, group, jagged, make_engine, update
from verl_pg_plugin.engine.metrics import MiniBatchCosts, figures_of_rank, mini_batch_metrics
from verl_pg_plugin.engine.plan import Plan, PlannedMicroBatch, plan_mini_batch
from verl_pg_plugin.layout import Sequences
from verl_pg_plugin.mixers import PairCost
from verl_pg_plugin.modalities import TEXT
from verl_pg_plugin.planning.activation_level import Level
from verl_pg_plugin.planning.activation_policy import ActivationPolicy
from verl_pg_plugin.planning.cost import ModelFlops

pytestmark = pytest.mark.usefixtures("process_group")

FLOPS = ModelFlops(per_token=100.0, per_label=10.0, pairs=(PairCost(1.0),))
# Two prompts of three tokens, with a common beginning and two responses of one token each.
TOKENS = np.array([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 4, 1, 2, 6, 5])
SEQUENCES = Sequences(TOKENS, offsets=np.array([0, 4, 8, 12, 16]), prompt_lengths=np.array([3, 3, 3, 3]))
NONE = MiniBatchCosts()
SHARED, ALONE = 2 * (4 * 100 + 2 * 10 + (1 + 2 + 3 + 3)), 4 * (4 * 100 + 4 * 10 + (1 + 2 + 3 + 4))
GAIN, WHOLE_PROMPTS = pytest.approx(ALONE / SHARED), 16 / (2 * 2 + 4 * 1)
FULL = [MiniBatchCosts(peak_cached_bytes=size) for size in (2**31, 2**30)]
VERIFIED = [MiniBatchCosts(True, num_verified=n, verify_max_error=error) for n, error in ((4, 1e-6), (2, 3e-6))]
# Groups are prompts: all four begin with token 1, one root.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the gain, and that of whole prompts": (
        {},
        {"flop_ratio": GAIN, "dedup_ratio": 16 / 8, "dedup_ratio_of_groups": WHOLE_PROMPTS},
    ),
    "padding is physical and no work": (
        {"costs": [MiniBatchCosts(num_padding=8)]},
        {"flop_ratio": GAIN, "dedup_ratio": 16 / 16, "padding_tokens": 8.0},
    ),
    "ranks that share their sequences count once": (
        {"costs": [NONE, NONE], "sp_size": 2},
        {"total_tokens": 16.0, "computed_tokens": 8.0},
    ),
    "micro-batches of one prompt": ({}, {"groups_per_micro_batch": 1}),
    "micro-batches of two prompts": ({"indices": [[0, 2], [1, 3]]}, {"groups_per_micro_batch": 2}),
    "the memory of the fullest rank": ({"costs": FULL}, {"prefix_cache_gib": 2.0, "host_gib": 1.0}),
    "verified samples of all ranks": ({"costs": VERIFIED}, {"verified_sequences": 6.0, "verify_max_error": 3e-6}),
    "nothing verified": ({"costs": [MiniBatchCosts(True)]}, {"verified_sequences": 0.0, "verify_max_error": None}),
    "nothing to verify": ({}, {"verified_sequences": None, "verify_max_error": None}),
}
"""Arguments of ``metrics_of``, and its metrics (None: absent)."""


def metrics_of(indices: Any = ((0, 1), (2, 3)), costs: Any = (NONE,), sp_size: int = 1) -> dict[str, Any]:
    """Metrics of these micro-batches with ``costs`` of each rank."""
    micro_batches = [
        PlannedMicroBatch(members, SEQUENCES.select(members).build_layout(), None, Level.INPUTS_ON_HOST, True, True)
        for members in map(list, indices)
    ]
    levels = ActivationPolicy(sizes=SimpleNamespace(saved=lambda level: 2**28))  # bytes of each of four tokens
    plan = Plan(TensorDict({}, []), SEQUENCES, micro_batches, 0, [], 0, False, levels)
    return mini_batch_metrics([figures_of_rank(plan, FLOPS, of_rank) for of_rank in costs], sp_size, "sdpa")


@pytest.mark.parametrize("case", CASES)
def test_metrics_of_a_mini_batch(case: str) -> None:
    arguments, expected = CASES[case]
    metrics = metrics_of(**arguments)
    for name, value in expected.items():
        assert metrics.get(f"prefix_grouper/{name}") == (None if value is None else [value]), name


def test_prompts_of_another_class_are_another_group() -> None:
    assert replace(SEQUENCES, classes=np.array([0, 1, 0, 0])).prompt_groups.tolist() == [0, 1, 2, 2]


def test_micro_batches_run_in_order_of_flops() -> None:
    batch = make_batch([*group(4, [6] * 8, 2), *group(40, [6], 1)], max_token_len_per_gpu=60)
    for flops in (ModelFlops(0.0, 0.0, (PairCost(1.0),)), ModelFlops(1.0, 0.0, ())):
        options = {"packed": True, "caches": False, "forward_only": False, "policy": ActivationPolicy()}
        layouts = [p.layout for p in plan_mini_batch(batch.clone(), TEXT, flops, **options).micro_batches]
        costs = [flops.forward([layout]) for layout in layouts]
        assert costs == sorted(costs, reverse=True)
        assert (layouts[0].num_tokens > layouts[1].num_tokens) == (not flops.pairs), "more tokens, fewer pairs here"


# Few long responses, and many short ones: cuts of equal sequence counts have unequal token counts.
SAMPLES = [*group(6, [40, 38], 1), *group(9, [2, 3, 1, 2], 2)]
LOGGED = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/pg_loss")


def loss_metrics(engine: Any, sequences: list[int] | None = None, **cut: Any) -> dict[str, Any]:
    batch = make_batch(SAMPLES, **cut)
    # The old policy differs from the new one mainly in long responses.
    batch["old_log_probs"] = jagged([old - 0.3 * (len(old) > 9) for old in batch["old_log_probs"].unbind()])
    if sequences is not None:
        batch = tu.index_select_tensor_dict(batch, torch.tensor(sequences))
    return update(engine, batch).metrics


def on_rank(rank: int, path: str) -> dict[str, Any]:
    sequences = [[0, 1, 2], [3, 4, 5]][rank]
    return loss_metrics(make_engine(path), sequences, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)


@pytest.mark.parametrize(
    "cut", [{"max_token_len_per_gpu": 60}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}], ids=str
)
def test_kl_and_clip_fraction_do_not_depend_on_micro_batches(packed: Any, cut: dict[str, Any]) -> None:
    whole, in_parts = (reduce_metrics(loss_metrics(packed, **made)) for made in ({"max_token_len_per_gpu": 1000}, cut))
    assert abs(whole["actor/ppo_kl"]) > 0.01
    for name in LOGGED:
        assert in_parts[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_rollout_correction_metrics_are_left_unchanged(packed: Any) -> None:
    """Some of them are extremes."""
    bypass = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0, bypass_mode=True)
    loss = actor_loss(policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=bypass))
    logged = update(packed, make_batch(SAMPLES, max_token_len_per_gpu=60), loss).metrics
    assert logged["rollout_corr/rollout_is_max"].values == [2.0] * len(logged["actor/ppo_kl"].values)


def test_ranks_are_weighted_by_their_tokens(packed: Any, qwen3: str) -> None:
    """verl's worker aggregates the metrics of ranks."""
    whole, ranks = reduce_metrics(loss_metrics(packed)), on_ranks(2, on_rank, qwen3)
    for name in LOGGED[:3]:
        assert Metric.aggregate_dp([rank[name] for rank in ranks]) == pytest.approx(whole[name], rel=1e-4, abs=1e-6)
