"""verl's V0 trainer (``trainer.use_v1=False``) end to end: Ray, FSDP2 and Hydra, in packed mode."""

import re
from pathlib import Path

import pytest
import torch

from tests.test_end_to_end import assert_shared, train
from verl_pg_plugin.config import Mode

V0 = "trainer.use_v1=False"
VERLS_ENTRY_POINT = "verl.trainer.main_ppo"
# One optimizer step a training step: what V0 and V1 sample is the same, the order in which it arrives is not.
ONE_MINI_BATCH = {"TRAIN_BATCH_SIZE": "8", "PPO_MINI_BATCH_SIZE": "8"}
TRAINED = ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/kl_loss", "actor/grad_norm")

pytestmark = pytest.mark.timeout(1800)


def values(steps: list[dict[str, float]], name: str) -> list[float]:
    return [step[name] for step in steps]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of every shard of the actor's checkpoint."""
    shards = sorted((checkpoint / "actor").glob("model_*.pt"))
    assert shards
    loaded = [torch.load(shard, weights_only=False) for shard in shards]
    return {
        f"{number}.{name}": getattr(value, "_local_tensor", value)
        for number, shard in enumerate(loaded)
        for name, value in shard.items()
    }


def test_five_groups_train_on_two_ranks_through_verls_own_entry_point(tmp_path: Path) -> None:
    """verl's V0 refuses the flag with a number of groups that the ranks do not divide."""
    sizes = {"TRAIN_BATCH_SIZE": "5", "PPO_MINI_BATCH_SIZE": "5", "ROLLOUT_N": "4", "TOTAL_STEPS": "1"}
    summary, (step,) = train(tmp_path, V0, ENTRY_POINT=VERLS_ENTRY_POINT, NGPUS_PER_NODE="2", **sizes)
    assert summary["mode"] == Mode.PACKED.value
    assert_shared([step], least=5)
    assert step["prefix_grouper/balance/cut_groups"] == 1, "10 sequences a rank are two groups of four and a half"
    assert step["prefix_grouper/balance/slowest_over_mean"] < 1.05
    shown = (tmp_path / "console.log").read_text()
    assert re.search(r"step 1/1: \d+\.\d% of tokens not computed, dedup ratio \d", shown), "what the step saved"
    assert "shared prefixes, mean over the run: " in shown, "the gain at the end"


@pytest.mark.slow
def test_v0_and_v1_train_alike_from_one_seed(tmp_path: Path) -> None:
    sizes = {"TOTAL_STEPS": "3", **ONE_MINI_BATCH}
    packed, ours = train(tmp_path / "v0", V0, **sizes)
    _, v1 = train(tmp_path / "v1", **sizes)
    rmpad, stock = train(tmp_path / "rmpad", V0, USE_PREFIX_GROUPER="False", **sizes)
    assert (packed["mode"], rmpad["mode"]) == (Mode.PACKED.value, Mode.RMPAD.value)
    for name in TRAINED:
        assert values(ours, name) == pytest.approx(values(v1, name), rel=1e-4), f"{name} under V1"
        assert values(ours, name) == pytest.approx(values(stock, name), rel=1e-4), f"{name} without sharing"
    assert len(set(values(ours, "actor/entropy"))) == 3, "equal steps would prove nothing"


@pytest.mark.slow
def test_a_run_that_stops_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    saving = (V0, "trainer.save_freq=2", "trainer.resume_mode=auto", f"trainer.default_local_dir={checkpoints}")
    train(tmp_path / "first", *saving, TOTAL_STEPS="2", **ONE_MINI_BATCH)
    _, resumed = train(tmp_path / "second", *saving, TOTAL_STEPS="4", **ONE_MINI_BATCH)
    assert values(resumed, "training/global_step") == [3, 4]
    _, whole = train(tmp_path / "whole", V0, TOTAL_STEPS="4", **ONE_MINI_BATCH)
    for name in TRAINED:
        assert values(resumed, name) == pytest.approx(values(whole, name)[2:], rel=1e-4), name


@pytest.mark.slow
def test_full_determinism_repeats_a_run_bit_by_bit(tmp_path: Path) -> None:
    """On two ranks, in mini-batches of one training step, as verl's documentation asks for it (V0)."""
    flags = [
        V0,
        "actor_rollout_ref.rollout.full_determinism=True",
        "actor_rollout_ref.actor.fsdp_config.full_determinism=True",
        "actor_rollout_ref.ref.fsdp_config.full_determinism=True",
        "trainer.save_freq=2",
    ]
    runs = []
    for name in ("first", "second"):
        folder = tmp_path / name
        _, steps = train(
            folder, *flags, f"trainer.default_local_dir={folder}/checkpoints", NGPUS_PER_NODE="2", OMP_NUM_THREADS="1"
        )
        runs.append((steps, weights(folder / "checkpoints" / "global_step_2")))
    (first_steps, first), (second_steps, second) = runs
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
    timed = ("timing", "perf/")
    for one, other in zip(first_steps, second_steps, strict=True):
        untimed = [name for name in one if not any(part in name for part in timed)]
        assert [(name, one[name]) for name in untimed] == [(name, other[name]) for name in untimed]
