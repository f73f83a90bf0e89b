"""The options and the batch of the matrix."""

from typing import Any

import torch

from tests.engine.test_exactness import MIXED
from tests.options.option import FSDP, Case, Option, Place
from tests.support import group
from verl_pg_plugin.config.keys import ACTOR, MODEL

CUT, TOKENS, HEAD, LAYERS, WEIGHTS = Place

SAMPLES = [*MIXED, *group(11, [6], 9)]
"""Uneven groups of 4, 2, 1 and 1."""
BUDGET = 60
"""Default token budget: several micro-batches."""
TEMPERATURES = {"temperature": torch.tensor([0.5, 1.0, 2.0, 1.0, 0.9, 0.9, 1.3, 0.7])}
"""One for each of the samples."""

DYNAMIC = f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu"
FIXED = f"{ACTOR}.use_dynamic_bsz=False {ACTOR}.ppo_micro_batch_size_per_gpu"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
FUSED = f"{MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend"
NOT_FUSED = frozenset({"sum of squared probabilities", "temperature of each sample"})


def budget(tokens: int) -> dict[str, Any]:
    return {"use_dynamic_bsz": True, "max_token_len_per_gpu": tokens}


def ulysses(ranks: int) -> Option:
    places = {CUT, TOKENS, HEAD, WEIGHTS}
    return Option(f"Ulysses sequence parallelism, {ranks} ranks", f"{ULYSSES}={ranks}", places, num_ranks=ranks)


def fused(name: str, backend: str) -> Option:
    model = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": backend}}
    flags = {"masks": True, "refuses": NOT_FUSED, "needs_gpu": backend == "triton"}
    return Option(name, f"{FUSED}={backend}", {HEAD}, model=model, batch={"use_fused_kernels": True}, **flags)


BY_TWO = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
PADS = f"{ACTOR}.pad_to_length=True"
MICRO_BATCHES = (
    Option("dynamic batch size", f"{DYNAMIC}=16384", {CUT}, batch=budget(45)),
    Option("a group larger than the token budget", f"{DYNAMIC}=4096", set(Place), batch=budget(38), splits=True),
    Option("fixed micro-batch size", f"{FIXED}=2", {CUT, TOKENS}, batch=BY_TWO),
    Option("verify mode", "++prefix_grouper.verify=every_1", {CUT, TOKENS, HEAD, LAYERS}),
    Option("pad_to_length", f"{PADS} {FSDP}.pad_to_length_bucket=1024", {TOKENS}, engine={"pad_to_length_bucket": 64}),
    *(ulysses(ranks) for ranks in (2, 4)),
)

NO_ENTROPY = {"batch": {"calculate_entropy": False}, "loss": {"entropy_coeff": 0.0}}
ENTROPY = {"batch": {"calculate_entropy": True}, "loss": {"entropy_coeff": 0.1}}
SQUARES = {"calculate_sum_pi_squared": True}
ENTROPY_CHUNKS = {"entropy_from_logits_chunk_size": 16}
OUTPUTS = (
    Option("log-probs without entropy", f"{ACTOR}.calculate_entropy=False", {HEAD}, masks=True, **NO_ENTROPY),
    Option("entropy bonus", f"{ACTOR}.entropy_coeff=0.1", {HEAD}, **ENTROPY),
    Option("entropy checkpointing", f"{ACTOR}.entropy_checkpointing=True", {HEAD, LAYERS}),
    Option("chunked entropy", f"{ACTOR}.entropy_from_logits_with_chunking=True", {HEAD}, engine=ENTROPY_CHUNKS),
    Option("sum of squared probabilities", f"{ACTOR}.calculate_sum_pi_squared=True", {HEAD}, batch=SQUARES),
    Option("temperature of the run", "actor_rollout_ref.rollout.temperature=0.7", {HEAD}, batch={"temperature": 0.7}),
    Option("temperature of each sample", "(a field of the batch)", {HEAD, CUT}, masks=True, batch=TEMPERATURES),
    Option("head in chunks", "++prefix_grouper.logits_chunk_size=4096", {HEAD}, engine={"logits_chunk_size": 3}),
    *(fused(*kernels) for kernels in (("fused kernels, torch", "torch"), ("fused kernels, Triton", "triton"))),
    Option("compiled entropy", f"{FSDP}.use_torch_compile=True", {HEAD}, compiles=True),
)

ADAPTERS = {"lora_alpha": 8, "target_modules": "all-linear"}
HOW_LAYERS_RUN = (
    Option("no gradient checkpointing", f"{MODEL}.enable_gradient_checkpointing=False", {LAYERS}, masks=True),
    Option("activation offload", f"{MODEL}.enable_activation_offload=True", {LAYERS}),
    Option("compiled layers", "++prefix_grouper.compile_layers=True", {LAYERS, TOKENS}, compiles=True),
    Option("attention recomputed in the backward", "++prefix_grouper.activations=inputs", {LAYERS}),
    Option("Liger kernels", f"{MODEL}.use_liger=True", {LAYERS}, needs_gpu=True),
    Option("LoRA", f"{MODEL}.lora_rank=4", {LAYERS, HEAD, WEIGHTS}, model=ADAPTERS),
)

NO_SYNC = f"{FSDP}.use_no_sync_for_gradient_accumulation"
HOW_WEIGHTS_ARE_KEPT = (
    Option("parameter offload", f"{FSDP}.param_offload=True", {WEIGHTS}),
    Option("optimizer offload", f"{FSDP}.optimizer_offload=True", {WEIGHTS}),
    Option("FSDP2 offload policy", f"{FSDP}.offload_policy=True", {WEIGHTS}, masks=True),
    Option("weights kept after the forward", f"{FSDP}.reshard_after_forward=False", {WEIGHTS}),
    Option("gradients reduced after every micro-batch", f"{NO_SYNC}=False", {WEIGHTS}),
    Option("FSDP2", f"{ACTOR}.strategy=fsdp2", {WEIGHTS}),
    # In all places: compiled layers read its flat parameters.
    Option("FSDP1", f"{ACTOR}.strategy=fsdp", set(Place), engine={"strategy": "fsdp"}, needs_gpu=True),
    Option("hybrid sharding", f"{FSDP}.fsdp_size=2", {WEIGHTS}, engine={"fsdp_size": 2}, num_ranks=4),
)

OPTIONS = (*MICRO_BATCHES, *OUTPUTS, *HOW_LAYERS_RUN, *HOW_WEIGHTS_ARE_KEPT)


def case_of(*names: str) -> Case:
    by_name = {option.name: option for option in OPTIONS}
    return Case(tuple(by_name[name] for name in names))


DEFAULT = case_of("FSDP2")
"""The case without options."""
