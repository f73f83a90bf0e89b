"""Options through verl's trainer: two steps each of the example, with all that Ray, TransferQueue and Hydra add."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.options.table import ACTOR, FSDP, MODEL, ROLLOUT, case_of
from tests.test_end_to_end import train
from verl_pg_plugin.config import Mode

REF = "actor_rollout_ref.ref"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Run:
    """A run of the example with names of options and what switches them on."""

    options: tuple[str, ...]
    overrides: tuple[str, ...]
    num_workers: int = 1
    rollout_tolerance: float = 1e-4
    least_dedup_ratio: float = 8.0


RUNS = {
    "sequence-parallel workers with fused kernels and padded micro-batches": Run(
        ("Ulysses sequence parallelism, 2 ranks", "fused kernels, torch", "pad_to_length", "entropy bonus"),
        (
            f"{ACTOR}.ulysses_sequence_parallel_size=2",
            f"{REF}.ulysses_sequence_parallel_size=2",
            f"{MODEL}.use_fused_kernels=True",
            f"{MODEL}.fused_kernel_options.impl_backend=torch",
            f"{ACTOR}.pad_to_length=True",
            f"{FSDP}.pad_to_length_bucket=128",
            f"{ACTOR}.entropy_coeff=0.01",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
        ),
        num_workers=2,
    ),
    "compiled layers and adapters, verified": Run(
        ("compiled layers", "head in chunks", "verify mode", "LoRA", "entropy bonus"),
        (
            "prefix_grouper.compile_layers=True",
            "prefix_grouper.logits_chunk_size=64",
            "prefix_grouper.verify=every_1",
            f"{MODEL}.enable_gradient_checkpointing=True",
            f"{MODEL}.lora_rank=4",
            f"{MODEL}.lora_alpha=8",
            f"{MODEL}.target_modules=all-linear",
            f"{MODEL}.lora.merge=True",
            f"{ACTOR}.entropy_coeff=0.01",
        ),
        rollout_tolerance=2e-2,  # verl hands merged adapters to the rollout in bf16, whose step is 8e-3
    ),
    "offload on two workers with KL in the reward": Run(
        ("parameter offload", "optimizer offload", "entropy checkpointing", "chunked entropy", "KL in the reward"),
        (
            f"{FSDP}.param_offload=True",
            f"{FSDP}.optimizer_offload=True",
            f"{ACTOR}.entropy_checkpointing=True",
            f"{ACTOR}.entropy_from_logits_with_chunking=True",
            f"{ACTOR}.entropy_coeff=0.01",
            f"{ACTOR}.calculate_sum_pi_squared=True",
            "algorithm.use_kl_in_reward=True",
            f"{ACTOR}.use_kl_loss=False",
        ),
        num_workers=2,
    ),
    "groups larger than the budget at another temperature": Run(
        (
            "a group larger than the token budget",
            "attention recomputed in the backward",
            "compiled entropy",
            "temperature of the run",
            "FSDP2 offload policy",
        ),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=288",
            f"{REF}.log_prob_max_token_len_per_gpu=288",
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu=288",
            f"{MODEL}.enable_gradient_checkpointing=True",
            "prefix_grouper.activations=inputs",
            f"{FSDP}.use_torch_compile=True",
            f"{FSDP}.offload_policy=True",
            f"{ROLLOUT}.temperature=0.7",
        ),
        least_dedup_ratio=2,
    ),
    "replicated shards and fixed micro-batches in bf16 on four workers": Run(
        ("hybrid sharding", "fixed micro-batch size", "weights kept after the forward", "mixed precision bf16"),
        (
            f"{FSDP}.fsdp_size=2",
            f"{FSDP}.reshard_after_forward=False",
            f"{FSDP}.use_no_sync_for_gradient_accumulation=False",
            f"{ACTOR}.use_dynamic_bsz=False",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
            f"{REF}.log_prob_use_dynamic_bsz=False",
            f"{REF}.log_prob_micro_batch_size_per_gpu=4",
            f"{ROLLOUT}.log_prob_use_dynamic_bsz=False",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
            f"++{FSDP}.mixed_precision={{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}}",
        ),
        num_workers=4,
        rollout_tolerance=5e-2,  # the rollout computes in float32
        least_dedup_ratio=2,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_options_that_real_runs_switch_on_train_together(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run = RUNS[name]
    summary, steps = train(tmp_path, *run.overrides, NGPUS_PER_NODE=str(run.num_workers), OMP_NUM_THREADS="1")
    assert summary["mode"] == Mode.PACKED.value
    for step in steps:
        assert step["actor/prefix_grouper/dedup_ratio"] > run.least_dedup_ratio
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < run.rollout_tolerance
        if "verify mode" in run.options:
            assert step["actor/prefix_grouper/verified_rows"] > 0
        if "KL in the reward" in run.options:
            assert abs(step["actor/reward_kl_penalty"]) < 1, "reference and old log-probs are nearly the same"
    for option in case_of(*run.options).options:
        record_property("option", option.name)


def test_group_filtering_drops_whole_groups(tmp_path: Path) -> None:
    summary, steps = train(
        tmp_path,
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward",
        "trainer.v1.sampler.custom_sampler.path=null",
        "trainer.v1.sampler.custom_sampler.name=null",
    )
    assert summary["mode"] == Mode.PACKED.value
    for step in steps:
        assert step["prefix_grouper/balance/cut_groups"] == 0
        assert step["actor/prefix_grouper/dedup_ratio"] > 8
        assert step["critic/score/min"] < step["critic/score/max"]
