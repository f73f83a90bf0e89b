"""Every option of the support table, in its order, and the batch that the matrix runs it on."""

import torch
from verl.workers.config.engine import QATEngineConfig
from verl.workers.config.model import MtpConfig

from tests.engine.test_exactness import MIXED
from tests.options.option import ACTOR, FSDP, MODEL, Case, Option, Place
from tests.support import group

CUT, TOKENS, HEAD, LAYERS, WEIGHTS = Place
EVERYWHERE = frozenset({CUT, TOKENS, HEAD, LAYERS})

ROLLOUT = "actor_rollout_ref.rollout"
CHUNKS = "tests/engine/test_chunks"
EXACT = "tests/engine/test_exactness.py::test_every_token_and_gradient_equals_the_sequence_alone"
PRECISION = "tests/options/test_precision.py::test_error_is_at_most_that_of_stock_rmpad"
REFUSED = "tests/config/test_rules.py::test_preflight_and_engine_refuse_the_same"
RUNS = "tests/options/test_training_runs.py"

SAMPLES = [*MIXED, *group(11, [6], 9)]
"""Uneven groups of 4, 2, 1 and 1."""
BUDGET = 60
"""Tokens of a micro-batch where no option says otherwise: the groups fall into several."""
TEMPERATURES = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.9, 0.9, 1.3, 0.7])
"""One for each of the samples."""

FUSED = f"{MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend"
NOT_FUSED = frozenset({"sum of squared probabilities", "temperature of each sample"})
FUSED_IN_STOCK = "stock verl 0.9.1 fails with them under FSDP2 with untied embeddings"
OF_STOCK = "error against float32 at most 1.1 times that of stock rmpad"
REDUCED = "+{}.mixed_precision={{param_dtype: {}, reduce_dtype: fp32, buffer_dtype: fp32}}"

MICRO_BATCHES = (
    Option(
        "dynamic batch size",
        f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=16384",
        {CUT},
        batch={"use_dynamic_bsz": True, "max_token_len_per_gpu": 45},
        note="the budget counts deduplicated tokens",
    ),
    Option(
        "a group larger than the token budget",
        f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=4096",
        EVERYWHERE,
        batch={"use_dynamic_bsz": True, "max_token_len_per_gpu": 38},
        splits=True,
        proofs=tuple(f"{CHUNKS}{name}.py" for name in ("", "_gpu", "_ranks")),
        note="its chunks read what they share from a prefix KV cache (`prefix_grouper.carry`)",
    ),
    Option(
        "fixed micro-batch size",
        f"{ACTOR}.use_dynamic_bsz=False {ACTOR}.ppo_micro_batch_size_per_gpu=2",
        {CUT, TOKENS},
        batch={"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    ),
    Option(
        "verify mode",
        "prefix_grouper.verify=every_1",
        EVERYWHERE,
        proofs=("tests/engine/test_verify.py", "tests/engine/test_verify_faults.py"),
        note="recomputes some samples alone and compares",
    ),
    Option(
        "balanced batches",
        "trainer.balance_batch=True",
        proofs=("tests/planning/test_balance.py", "tests/trainer/test_v1.py"),
        note="groups stay whole; balanced by deduplicated cost",
    ),
    Option(
        "pad_to_length",
        f"{ACTOR}.pad_to_length=True {FSDP}.pad_to_length_bucket=1024",
        {TOKENS},
        engine={"pad_to_length_bucket": 64},
    ),
    *(
        Option(
            f"Ulysses sequence parallelism, {ranks} ranks",
            f"{ACTOR}.ulysses_sequence_parallel_size={ranks}",
            {CUT, TOKENS, HEAD, WEIGHTS},
            num_ranks=ranks,
            proofs=("tests/models/test_ulysses.py",),
            note="also with fewer key-value heads than ranks" if ranks == 4 else "",
        )
        for ranks in (2, 4)
    ),
)

OUTPUTS = (
    Option(
        "log-probs without entropy",
        f"{ACTOR}.calculate_entropy=False",
        {HEAD},
        masks=True,
        batch={"calculate_entropy": False},
        loss={"entropy_coeff": 0.0},
    ),
    Option(
        "entropy bonus",
        f"{ACTOR}.entropy_coeff=0.1",
        {HEAD},
        batch={"calculate_entropy": True},
        loss={"entropy_coeff": 0.1},
    ),
    Option("entropy checkpointing", f"{ACTOR}.entropy_checkpointing=True", {HEAD, LAYERS}),
    Option(
        "chunked entropy",
        f"{ACTOR}.entropy_from_logits_with_chunking=True",
        {HEAD},
        engine={"entropy_from_logits_chunk_size": 16},
    ),
    Option(
        "sum of squared probabilities",
        f"{ACTOR}.calculate_sum_pi_squared=True",
        {HEAD},
        batch={"calculate_sum_pi_squared": True},
    ),
    Option("temperature of the run", f"{ROLLOUT}.temperature=0.7", {HEAD}, batch={"temperature": 0.7}),
    Option(
        "temperature of each sample",
        "(a field of the batch)",
        {HEAD, CUT},
        masks=True,
        batch={"temperature": TEMPERATURES},
        note="samples of different temperatures share no tokens",
    ),
    Option(
        "head in chunks",
        "prefix_grouper.logits_chunk_size=4096",
        {HEAD},
        engine={"logits_chunk_size": 3},
        proofs=("tests/engine/test_heads.py",),
    ),
    *(
        Option(
            f"fused kernels, {backend if backend == 'torch' else 'Triton'}",
            f"{FUSED}={backend}",
            {HEAD},
            model={"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": backend}},
            batch={"use_fused_kernels": True},
            masks=True,
            refuses=NOT_FUSED,
            needs_gpu=backend == "triton",
            note=FUSED_IN_STOCK,
        )
        for backend in ("torch", "triton")
    ),
    Option("compiled entropy", f"{FSDP}.use_torch_compile=True", {HEAD}, compiles=True),
)

HOW_LAYERS_RUN = (
    Option("no gradient checkpointing", f"{MODEL}.enable_gradient_checkpointing=False", {LAYERS}, masks=True),
    Option(
        "activation offload",
        f"{MODEL}.enable_activation_offload=True",
        {LAYERS},
        proofs=("tests/engine/test_activations.py",),
        note="`++prefix_grouper.activations=auto` then takes `attention_on_host` or `inputs_on_host`",
    ),
    Option(
        "compiled layers",
        "prefix_grouper.compile_layers=True",
        {LAYERS, TOKENS},
        compiles=True,
        proofs=("tests/engine/test_compiled_layers.py",),
        note="no recompilation while micro-batches change; over several processes on CPUs alone",
    ),
    Option(
        "attention recomputed in the backward",
        "prefix_grouper.activations=inputs",
        {LAYERS},
        proofs=("tests/engine/test_activations.py",),
        note="without it, gradient checkpointing keeps the outputs of attention",
    ),
    Option("Liger kernels", f"{MODEL}.use_liger=True", {LAYERS}, needs_gpu=True, note="liger-kernel needs Triton"),
    Option(
        "LoRA",
        f"{MODEL}.lora_rank=4",
        {LAYERS, HEAD, WEIGHTS},
        model={"lora_alpha": 8, "target_modules": "all-linear"},
        proofs=("tests/options/test_reference_policy.py::test_lora",),
        note="the reference is the model with its adapter disabled",
    ),
)

HOW_WEIGHTS_ARE_KEPT = (
    Option(
        "parameter offload",
        f"{FSDP}.param_offload=True",
        {WEIGHTS},
        note="on GPUs whose number divides every parameter, see docs/benchmarks.md",
    ),
    Option("optimizer offload", f"{FSDP}.optimizer_offload=True", {WEIGHTS}),
    Option("FSDP2 offload policy", f"{FSDP}.offload_policy=True", {WEIGHTS}, masks=True),
    Option("weights kept after the forward", f"{FSDP}.reshard_after_forward=False", {WEIGHTS}),
    Option(
        "gradients reduced after every micro-batch", f"{FSDP}.use_no_sync_for_gradient_accumulation=False", {WEIGHTS}
    ),
    Option(
        "FSDP2",
        f"{ACTOR}.strategy=fsdp2",
        {WEIGHTS},
        proofs=("tests/engine/test_two_ranks.py::test_gradients",),
        note="1, 2 and 4 processes",
    ),
    Option(
        "FSDP1",
        f"{ACTOR}.strategy=fsdp",
        set(Place),  # it has flat parameters, which compiled layers read
        engine={"strategy": "fsdp"},
        needs_gpu=True,
        proofs=(
            "tests/options/test_compiled_fsdp1.py",
            f"{CHUNKS}_ranks.py::test_ranks_with_unequal_numbers_of_oversized_groups_are_exact[fsdp-",
        ),
        note="FSDP1 refuses models on a CPU; there two processes with that check taken out",
    ),
    Option("hybrid sharding", f"{FSDP}.fsdp_size=2", {WEIGHTS}, engine={"fsdp_size": 2}, num_ranks=4),
    *(
        Option(f"mixed precision {dtype}", REDUCED.format(FSDP, dtype), proofs=(f"{PRECISION}[{dtype}",), note=OF_STOCK)
        for dtype in ("bf16", "fp16")
    ),
    Option(
        "other attention implementations",
        f"+{MODEL}.override_config.attn_implementation=flex_attention",
        proofs=("tests/options/test_matrix.py::test_another_attention",),
        note="replaced as sdpa and flash_attention_2 are, with a warning; prefix_grouper.attention_kernel selects the "
        "kernel",
    ),
)

OF_RUNS = (
    Option(
        "every policy loss and aggregation of verl",
        f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=seq-mean-token-mean",
        proofs=("tests/options/test_losses.py",),
        note="also losses that a user registers",
    ),
    Option(
        "distillation",
        "distillation.enabled=True distillation.distillation_loss.loss_mode=k3",
        proofs=("tests/engine/test_distillation.py",),
        note="every loss of verl, several teachers; with forward_kl_topk no fused kernels, and responses share the "
        "prompt alone",
    ),
    Option(
        "KL loss with a reference model",
        f"{ACTOR}.use_kl_loss=True",
        proofs=("tests/options/test_reference_policy.py",),
        note="the reference takes the packed path too; importance ratio 1 at step 0",
    ),
    Option("KL in the reward", "algorithm.use_kl_in_reward=True", proofs=(f"{RUNS}::test_options[offload",)),
    Option(
        "critic",
        "algorithm.adv_estimator=gae",
        proofs=("tests/engine/test_value_model.py", "tests/options/test_critic.py"),
        note="every option above that is not about the language-model head",
    ),
    Option(
        "checkpoint, resume, and resume with the mode toggled",
        "trainer.save_freq=10 trainer.resume_mode=auto",
        proofs=("tests/engine/test_two_ranks.py::test_checkpoint",),
        note="weights after the resume are bit-equal",
    ),
    Option(
        "resume after kill -9",
        "trainer.save_freq=1 trainer.resume_mode=auto",
        proofs=("tests/scripts/test_smoke_runs.py::test_tools_kill_and_resume",),
    ),
    Option(
        "V0 trainer",
        "trainer.use_v1=False",
        proofs=("tests/trainer/test_v0.py", "tests/trainer/test_v0_runs.py"),
        note="any number of groups; it has no group filtering and takes one row a session",
    ),
    Option(
        "trainers of other people",
        "trainer.v1.trainer_mode=NAME",
        proofs=("tests/trainer/test_any_trainer.py",),
        note="V1 ones by the name they are registered under, V0 ones through keep_groups",
    ),
    Option(
        "multi-turn rollouts with tool tokens",
        f"{ROLLOUT}.multi_turn.enable=True",
        proofs=(f"{EXACT}[tool", f"{EXACT}[multi_turn", f"{EXACT}[a_prompt_that_reaches"),
    ),
    Option("prompts of different lengths, varying n", "(what the rollout returns)", proofs=(f"{EXACT}[uneven",)),
    Option(
        "images and videos",
        "(a checkpoint of Qwen2.5-VL, Qwen3-VL or Qwen3.5)",
        proofs=tuple(f"tests/modalities/test_image{name}.py" for name in ("s", "_options", "_ranks")),
        note="each distinct image goes through the vision encoder once per micro-batch; no critics; Qwen3.5 within "
        "2e-5, 1e-4 for gradients that nearly cancel",
    ),
    Option(
        "group filtering (DAPO)",
        "algorithm.filter_groups.enable=True",
        proofs=(f"{EXACT}[uneven", f"{RUNS}::test_group_filtering"),
        note="verl's replay buffer drops whole groups",
    ),
    Option(
        "partial and asynchronous rollouts",
        "trainer.v1.trainer_mode=colocate_async",
        proofs=(
            "tests/options/test_losses.py::test_rows_of_one_prompt",
            "tests/test_end_to_end.py::test_verls_own_entry_point",
        ),
        note="sequences of one prompt may arrive in different batches",
    ),
)

REJECTED = (
    Option(
        "multi-token prediction",
        f"{MODEL}.mtp.enable=True",
        rejected=True,
        model={"mtp": MtpConfig(enable=True)},
        proofs=(REFUSED,),
        note="its heads read several tokens ahead, across the fork of a group",
    ),
    Option(
        "quantization-aware training",
        f"{ACTOR}.qat.enable=True",
        rejected=True,
        engine={"qat": QATEngineConfig(enable=True)},
        proofs=(REFUSED,),
        note="not verified with shared prefixes",
    ),
    Option(
        "multimodal checkpoints and batches",
        "(a checkpoint that takes images, audio or video)",
        rejected=True,
        proofs=(
            "tests/config/test_checkpoints.py::test_architectures_that_would_be_computed_wrongly_are_refused",
            "tests/engine/test_bad_batches.py::test_multimodal_rows",
        ),
        note="but for images in Qwen2.5-VL, Qwen3-VL and Qwen3.5",
    ),
    Option(
        "VeOmni, Megatron, torchtitan and other engines",
        "model_engine=megatron",
        rejected=True,
        proofs=("tests/config/test_rules.py",),
        note="fsdp and fsdp2 only; Ulysses instead of ring attention",
    ),
    Option(
        "attention dropout",
        f"+{MODEL}.override_config.attention_dropout=0.1",
        rejected=True,
        model={"override_config": {"attn_implementation": "sdpa", "attention_dropout": 0.1}},
        proofs=("tests/engine/test_mode_errors.py::test_attention_dropout",),
        note="a shared prefix would draw its random numbers once for all its responses",
    ),
)

OPTIONS = (*MICRO_BATCHES, *OUTPUTS, *HOW_LAYERS_RUN, *HOW_WEIGHTS_ARE_KEPT, *OF_RUNS, *REJECTED)


def case_of(*names: str) -> Case:
    """The options of these names together."""
    by_name = {option.name: option for option in OPTIONS}
    return Case(tuple(by_name[name] for name in names))


DEFAULT = case_of("FSDP2")
"""What every case has on already."""
