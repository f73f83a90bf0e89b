"""What a loss averages over tokens is logged as that average, however the mini-batch is cut."""

from typing import Any

import pytest
import torch
from verl.utils.metric import reduce_metrics

from tests.support import actor_loss, clone, group, make_engine
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

# Few long responses, and many short ones: fair cuts of sequences are unfair cuts of tokens.
SAMPLES = [*group(6, [40, 38], 1), *group(9, [2, 3, 1, 2], 2)]
LOGGED = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/pg_loss")


@pytest.fixture(scope="module")
def engine(qwen3: str, process_group: None) -> Any:
    return make_engine(qwen3, packed=True)


def logged(engine: Any, **cut: Any) -> dict[str, float]:
    batch = make_batch(SAMPLES, **cut)
    # An old policy that differs from the new one by far in long responses alone.
    old = [values - 0.3 * (len(values) > 9) for values in batch["old_log_probs"].unbind()]
    batch["old_log_probs"] = torch.nested.as_nested_tensor(old, layout=torch.jagged)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        return reduce_metrics(engine.forward_backward_batch(clone(batch), actor_loss())["metrics"])


@pytest.mark.parametrize(
    "cut", [{"max_token_len_per_gpu": 60}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}], ids=str
)
def test_kl_and_clip_fraction_do_not_depend_on_how_a_mini_batch_is_cut(engine: Any, cut: dict[str, Any]) -> None:
    """The mean over micro-batches that verl takes would count a short response as much as a long one."""
    whole, in_parts = logged(engine, max_token_len_per_gpu=1000), logged(engine, **cut)
    assert abs(whole["actor/ppo_kl"]) > 0.01
    for name in LOGGED:
        assert in_parts[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
