"""What a loss averages over tokens is logged as that average, however the mini-batch is cut."""

from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics

from tests.engine.ranks import on_ranks
from tests.support import actor_loss, clone, group, make_engine
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

# Few long responses, and many short ones: fair cuts of sequences are unfair cuts of tokens.
SAMPLES = [*group(6, [40, 38], 1), *group(9, [2, 3, 1, 2], 2)]
LOGGED = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/pg_loss")


@pytest.fixture(scope="module")
def engine(qwen3: str, process_group: None) -> Any:
    return make_engine(qwen3, packed=True)


def metrics_of(engine: Any, sequences: list[int] | None = None, **cut: Any) -> dict[str, Any]:
    batch = make_batch(SAMPLES, **cut)
    # An old policy that differs from the new one by far in long responses alone.
    old = [values - 0.3 * (len(values) > 9) for values in batch["old_log_probs"].unbind()]
    batch["old_log_probs"] = torch.nested.as_nested_tensor(old, layout=torch.jagged)
    if sequences is not None:
        batch = tu.index_select_tensor_dict(batch, torch.tensor(sequences))
    with engine.train_mode():
        engine.optimizer_zero_grad()
        return engine.forward_backward_batch(clone(batch), actor_loss())["metrics"]


def on_rank(rank: int, path: str) -> dict[str, Any]:
    sequences = [[0, 1, 2], [3, 4, 5]][rank]
    return metrics_of(make_engine(path, packed=True), sequences, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)


@pytest.mark.parametrize(
    "cut", [{"max_token_len_per_gpu": 60}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}], ids=str
)
def test_kl_and_clip_fraction_do_not_depend_on_how_a_mini_batch_is_cut(engine: Any, cut: dict[str, Any]) -> None:
    """The mean over micro-batches that verl takes would count a short response as much as a long one."""
    whole, in_parts = (reduce_metrics(metrics_of(engine, **made)) for made in ({"max_token_len_per_gpu": 1000}, cut))
    assert abs(whole["actor/ppo_kl"]) > 0.01
    for name in LOGGED:
        assert in_parts[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_a_rank_of_few_tokens_counts_as_little(engine: Any, qwen3: str) -> None:
    """As verl's worker puts the metrics of ranks together."""
    whole, ranks = reduce_metrics(metrics_of(engine)), on_ranks(2, on_rank, qwen3)
    for name in LOGGED[:3]:
        assert Metric.aggregate_dp([rank[name] for rank in ranks]) == pytest.approx(whole[name], rel=1e-4, abs=1e-6)
