"""Options through verl's trainer: two steps each of the example, with all that Ray, TransferQueue and Hydra add."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.options.keys import ACTOR, FSDP, MODEL, REF, ROLLOUT
from tests.options.table import case_of
from tests.test_end_to_end import REPOSITORY, train
from verl_pg_plugin.config import Mode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Run:
    """A run of the example with names of options and what switches them on."""

    name: str
    options: tuple[str, ...]
    overrides: tuple[str, ...]
    num_workers: int = 1
    rollout_tolerance: float = 1e-4
    least_dedup_ratio: float = 8.0

    def __str__(self) -> str:
        return self.name


RUNS = [
    Run(
        "sequence-parallel workers with fused kernels and bucketed rows",
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
    Run(
        "compiled layers on static rows, verified",
        ("compiled layers", "static rows", "head in chunks", "verify mode"),
        (
            "prefix_grouper.static_rows=True",
            "prefix_grouper.compile_layers=True",
            "prefix_grouper.logits_chunk_size=64",
            "prefix_grouper.verify=every_n",
            "prefix_grouper.verify_every=1",
            f"{MODEL}.enable_gradient_checkpointing=True",
        ),
        least_dedup_ratio=0.1,  # rows that fill up the budget count as computed
    ),
    Run(
        "adapters with the reference behind them",
        ("LoRA", "auto gate", "entropy bonus"),
        (
            f"{MODEL}.lora_rank=4",
            f"{MODEL}.lora_alpha=8",
            f"{MODEL}.target_modules=all-linear",
            f"{MODEL}.lora.merge=True",
            f"{ACTOR}.entropy_coeff=0.01",
            "prefix_grouper.min_dedup_ratio=2",
        ),
        rollout_tolerance=2e-2,  # verl hands merged adapters to the rollout in bf16, whose step is 8e-3
    ),
    Run(
        "offload on two workers with KL in the reward",
        (
            "parameter offload",
            "optimizer offload",
            "entropy checkpointing",
            "chunked entropy",
            "sum of squared probabilities",
        ),
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
    Run(
        "groups larger than the budget at another temperature",
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
            "prefix_grouper.recompute_attention=True",
            f"{FSDP}.use_torch_compile=True",
            f"{FSDP}.offload_policy=True",
            f"{ROLLOUT}.temperature=0.7",
        ),
        least_dedup_ratio=2,
    ),
    Run(
        "replicated shards and fixed micro-batches on four workers",
        (
            "hybrid sharding",
            "fixed micro-batch size",
            "weights kept after the forward",
            "gradients reduced after every micro-batch",
            "no gradient checkpointing",
        ),
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
        ),
        num_workers=4,
        least_dedup_ratio=2,
    ),
    Run(
        "four workers on one sequence in bf16",
        ("Ulysses sequence parallelism, 4 ranks", "mixed precision bf16"),
        (
            f"{ACTOR}.ulysses_sequence_parallel_size=4",
            f"{REF}.ulysses_sequence_parallel_size=4",
            f"++{FSDP}.mixed_precision={{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}}",
        ),
        num_workers=4,
        rollout_tolerance=5e-2,  # the rollout computes in float32
    ),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_options_that_real_runs_switch_on_train_together(
    run: Run, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    summary, steps = train(tmp_path, *run.overrides, NGPUS_PER_NODE=str(run.num_workers), OMP_NUM_THREADS="1")
    assert summary["mode"] == Mode.PACKED.value
    for step in steps:
        assert step["actor/prefix_grouper/dedup_ratio"] > run.least_dedup_ratio
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < run.rollout_tolerance
        if "verify mode" in run.options:
            assert step["actor/prefix_grouper/verified_rows"] > 0
        if "algorithm.use_kl_in_reward=True" in run.overrides:
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


@pytest.mark.timeout(1800)
def test_killed_run_resumes_after_its_last_checkpoint(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    checkpoints = killed / "checkpoints"
    overrides = ["trainer.save_freq=1", "trainer.resume_mode=auto", f"trainer.default_local_dir={checkpoints}"]
    # One optimizer step a training step: rows arrive in any order, and would fill mini-batches differently.
    variables = {"TRAIN_BATCH_SIZE": "8", "PPO_MINI_BATCH_SIZE": "8"}
    killed.mkdir()
    with open(killed / "run.log", "w") as log:
        run = subprocess.Popen(
            ["bash", "examples/run_qwen3_pg.sh", *overrides],
            cwd=REPOSITORY,
            env={**os.environ, **variables, "WORK_DIR": str(killed), "TOTAL_STEPS": "50"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            saved = checkpoints / "latest_checkpointed_iteration.txt"
            while not saved.exists():
                assert run.poll() is None, (killed / "run.log").read_text()[-3000:]
                time.sleep(0.1)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    last = int(saved.read_text())
    for log_of_killed in killed.glob("*/metrics.jsonl"):
        log_of_killed.rename(log_of_killed.with_name("killed.jsonl"))
    summary, steps = train(killed, *overrides, TOTAL_STEPS=str(last + 2), **variables)
    assert summary["mode"] == Mode.PACKED.value
    assert [step["training/global_step"] for step in steps] == [last + 1, last + 2]
    assert int(saved.read_text()) == last + 2
    _, uninterrupted = train(whole, TOTAL_STEPS=str(last + 2), **variables)
    for name in ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/kl_loss", "actor/grad_norm"):
        expected = [step[name] for step in uninterrupted[last:]]
        assert [step[name] for step in steps] == pytest.approx(expected, rel=1e-4), name
    assert len({step["actor/entropy"] for step in uninterrupted}) == last + 2, "equal steps would prove nothing"
