"""verl's V0 trainer (``trainer.use_v1=False``) end to end: Ray, FSDP2 and Hydra, in packed mode."""

import re
from pathlib import Path

import pytest

from tests.test_end_to_end import assert_shared, train
from verl_pg_plugin.config import Mode

V0 = "trainer.use_v1=False"
TRAINED = ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/kl_loss", "actor/grad_norm")

pytestmark = pytest.mark.timeout(1800)


def test_five_groups_train_on_two_ranks_through_verls_entry_point(tmp_path: Path) -> None:
    """verl's V0 alone refuses a number of groups that the ranks do not divide."""
    sizes = {"TRAIN_BATCH_SIZE": "5", "PPO_MINI_BATCH_SIZE": "5", "ROLLOUT_N": "4", "TOTAL_STEPS": "1"}
    summary, (step,) = train(tmp_path, V0, ENTRY_POINT="verl.trainer.main_ppo", NGPUS_PER_NODE="2", **sizes)
    assert summary["mode"] == Mode.PACKED.value
    assert_shared([step], least=5)
    assert step["actor/ppo_kl"] == 0, "old log-probs are those of the update"
    assert abs(step["rollout_corr/kl"]) < 1e-4
    assert step["prefix_grouper/balance/cut_groups"] == 1, "10 sequences a rank are two groups of four and a half"
    assert step["prefix_grouper/balance/slowest_over_mean"] < 1.05
    assert step["prefix_grouper/rollout/servers_per_prompt"] == 1, "of two"
    assert step["prefix_grouper/rollout/requests_per_group"] == 4
    shown = (tmp_path / "console.log").read_text()
    assert "rollouts: routing by prompt is on; shared decode is off" in shown
    assert "separate forward for old log-probs: none" in shown
    assert re.search(r"step 1/1: dedup ratio \d", shown), "what the step saved"
    assert "shared prefixes, mean over the run: " in shown, "the gain at the end"


@pytest.mark.slow
def test_v0_and_v1_train_to_equal_metrics_from_one_seed(tmp_path: Path) -> None:
    # One optimizer step for each training step: V0 and V1 get the same samples in a different order.
    sizes = {"TOTAL_STEPS": "3", "TRAIN_BATCH_SIZE": "8", "PPO_MINI_BATCH_SIZE": "8"}
    packed, ours = train(tmp_path / "v0", V0, **sizes)
    _, v1 = train(tmp_path / "v1", **sizes)
    rmpad, stock = train(tmp_path / "rmpad", V0, USE_PREFIX_GROUPER="False", **sizes)
    assert (packed["mode"], rmpad["mode"]) == (Mode.PACKED.value, Mode.RMPAD.value)
    for step, of_v1, of_stock in zip(ours, v1, stock, strict=True):
        for name in TRAINED:
            assert step[name] == pytest.approx(of_v1[name], rel=1e-4), f"{name} under V1"
            assert step[name] == pytest.approx(of_stock[name], rel=1e-4), f"{name} without sharing"
    assert len({step["actor/entropy"] for step in ours}) == 3, "steps differ"


@pytest.mark.slow
def test_full_determinism_repeats_a_run_bit_for_bit(tmp_path: Path) -> None:
    """On two ranks, with V0 as verl's documentation requires."""
    sections = ("rollout", "actor.fsdp_config", "ref.fsdp_config")
    flags = [f"actor_rollout_ref.{section}.full_determinism=True" for section in sections]
    ranks = {"NGPUS_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
    (_, first), (_, second) = (train(tmp_path / name, V0, *flags, **ranks) for name in ("first", "second"))
    for one, other in zip(first, second, strict=True):
        untimed = [name for name in one if "timing" not in name and "perf/" not in name]
        assert [(name, one[name]) for name in untimed] == [(name, other[name]) for name in untimed]
