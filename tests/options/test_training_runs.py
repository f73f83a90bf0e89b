"""Options through verl's trainer: two steps of the example, with Ray, TransferQueue and Hydra."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.options.option import FSDP
from tests.options.table import case_of
from tests.test_end_to_end import assert_shared, train
from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.keys import ACTOR, MODEL, REF, ROLLOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Run:
    """A run of the example with these options of the matrix and further overrides."""

    options: tuple[str, ...]
    overrides: tuple[str, ...]
    num_workers: int = 1
    rollout_tolerance: float = 1e-4
    least_dedup_ratio: float = 8.0


FIXED = "log_prob_use_dynamic_bsz=False", "log_prob_micro_batch_size_per_gpu=4"
RUNS = {
    "sequence-parallel workers with fused kernels and padded micro-batches": Run(
        ("Ulysses sequence parallelism, 2 ranks", "fused kernels, torch", "pad_to_length", "entropy bonus"),
        (
            f"{REF}.ulysses_sequence_parallel_size=2",
            f"{FSDP}.pad_to_length_bucket=128",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
        ),
        num_workers=2,
    ),
    "compiled layers and adapters, verified": Run(
        ("compiled layers", "head in chunks", "verify mode", "LoRA", "entropy bonus"),
        (
            "++prefix_grouper.logits_chunk_size=64",
            f"{MODEL}.enable_gradient_checkpointing=True",
            f"{MODEL}.lora_alpha=8",
            f"{MODEL}.target_modules=all-linear",
            f"{MODEL}.lora.merge=True",
        ),
        rollout_tolerance=2e-2,  # verl sends merged adapters to the rollout in bf16, whose step is 8e-3
    ),
    "groups larger than the budget at another temperature with KL in the reward": Run(
        (
            *("a group larger than the token budget", "attention recomputed in the backward", "compiled entropy"),
            *("temperature of the run", "FSDP2 offload policy"),
        ),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=288",
            *(f"{role}.log_prob_max_token_len_per_gpu=288" for role in (REF, ROLLOUT)),
            f"{MODEL}.enable_gradient_checkpointing=True",
            *("algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=False"),
        ),
        least_dedup_ratio=2,
    ),
    "replicated shards and fixed micro-batches in bf16 on four workers": Run(
        (
            *("hybrid sharding", "fixed micro-batch size", "weights kept after the forward"),
            "gradients reduced after every micro-batch",
        ),
        (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
            *(f"{role}.{override}" for role in (REF, ROLLOUT) for override in FIXED),
            f"++{FSDP}.mixed_precision={{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}}",
        ),
        num_workers=4,
        rollout_tolerance=5e-2,  # the rollout computes in float32
        least_dedup_ratio=2,
    ),
    "group filtering, which drops whole groups": Run(
        (),
        (
            *("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"),
            *(f"trainer.v1.sampler.custom_sampler.{key}=null" for key in ("path", "name")),
        ),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_options_that_real_runs_switch_on_train_together(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    overrides = [override for option in case_of(*run.options).options for override in option.override.split()]
    workers = {"NGPUS_PER_NODE": str(run.num_workers), "OMP_NUM_THREADS": "1"}
    summary, steps = train(tmp_path, *overrides, *run.overrides, **workers)
    assert summary["mode"] == Mode.PACKED.value
    assert_shared(steps, run.least_dedup_ratio, run.rollout_tolerance)
    for step in steps:
        if "verify mode" in run.options:
            assert step["actor/prefix_grouper/verified_sequences"] > 0
        if "algorithm.use_kl_in_reward=True" in run.overrides:
            assert abs(step["actor/reward_kl_penalty"]) < 1, "reference and old log-probs are nearly the same"
        if "algorithm.filter_groups.enable=True" in run.overrides:
            assert step["prefix_grouper/balance/cut_groups"] == 0
            assert step["critic/score/min"] < step["critic/score/max"]
