"""What the head puts out and how layers run."""

import torch

from tests.options.keys import ACTOR, EXACTNESS, FSDP, MODEL, STEPS, SUPPORT
from tests.options.option import Option, Place

CUT, ROWS, HEAD, LAYERS, WEIGHTS = Place.CUT, Place.ROWS, Place.HEAD, Place.LAYERS, Place.WEIGHTS
TEMPERATURES = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.9, 0.9, 1.3, 0.7])
"""One for each of the samples of the matrix."""

FUSED_IN_STOCK = "stock verl 0.9.1 fails with them under FSDP2 with untied embeddings"

MODEL_OPTIONS: tuple[Option, ...] = (
    # Outputs.
    Option(
        "log-probs without entropy",
        f"{ACTOR}.calculate_entropy=False",
        frozenset({HEAD}),
        batch={"calculate_entropy": False},
        loss={"entropy_coeff": 0.0},
    ),
    Option(
        "entropy bonus",
        f"{ACTOR}.entropy_coeff=0.1",
        frozenset({HEAD}),
        batch={"calculate_entropy": True},
        loss={"entropy_coeff": 0.1},
    ),
    Option(
        "entropy checkpointing",
        f"{ACTOR}.entropy_checkpointing=True",
        frozenset({HEAD, LAYERS}),
        engine={"entropy_checkpointing": True},
    ),
    Option(
        "chunked entropy",
        f"{ACTOR}.entropy_from_logits_with_chunking=True",
        frozenset({HEAD}),
        engine={"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 16},
    ),
    Option(
        "sum of squared probabilities",
        f"{ACTOR}.calculate_sum_pi_squared=True",
        frozenset({HEAD}),
        batch={"calculate_sum_pi_squared": True},
    ),
    Option(
        "temperature of the run",
        "actor_rollout_ref.rollout.temperature=0.7",
        frozenset({HEAD}),
        batch={"temperature": 0.7},
    ),
    Option(
        "temperature of each sample",
        "(a field of the batch)",
        frozenset({HEAD, CUT}),
        batch={"temperature": TEMPERATURES},
        note="samples of different temperatures share no rows",
    ),
    Option(
        "head in chunks",
        "prefix_grouper.logits_chunk_size=4096",
        frozenset({HEAD}),
        engine={"logits_chunk_size": 3},
        proofs=("tests/engine/heads/test_chunked_head.py", f"{EXACTNESS}::test_tied_embeddings_get_one_gradient"),
    ),
    Option(
        "fused kernels, torch",
        f"{MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend=torch",
        frozenset({HEAD}),
        model={"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}},
        batch={"use_fused_kernels": True},
        refuses=frozenset({"sum of squared probabilities", "temperature of each sample"}),
        note=FUSED_IN_STOCK,
    ),
    Option(
        "fused kernels, Triton",
        f"{MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend=triton",
        frozenset({HEAD}),
        model={"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "triton"}},
        batch={"use_fused_kernels": True},
        refuses=frozenset({"sum of squared probabilities", "temperature of each sample"}),
        needs_gpu=True,
        note=FUSED_IN_STOCK,
    ),
    Option(
        "compiled entropy",
        f"{FSDP}.use_torch_compile=True",
        frozenset({HEAD}),
        engine={"use_torch_compile": True},
        slow=True,
    ),
    # Layers.
    Option(
        "no gradient checkpointing",
        f"{MODEL}.enable_gradient_checkpointing=False",
        frozenset({LAYERS}),
        model={"enable_gradient_checkpointing": False},
    ),
    Option(
        "activation offload",
        f"{MODEL}.enable_activation_offload=True",
        frozenset({LAYERS}),
        model={"enable_activation_offload": True},
        needs_gpu=True,
        note="verl offloads into pinned memory, which needs a GPU",
    ),
    Option(
        "compiled layers",
        f"prefix_grouper.compile_layers=True {ACTOR}.strategy=fsdp2",
        frozenset({LAYERS, ROWS}),
        engine={"compile_layers": True},
        slow=True,
        proofs=(
            "tests/engine/test_compiled_layers.py",
            f"{STEPS}/test_carry.py::test_carried_groups_stay_exact_with[static rows and compiled layers",
        ),
        note="no recompilation while micro-batches change; over several processes on CPUs alone",
    ),
    Option(
        "attention recomputed in the backward",
        "prefix_grouper.recompute_attention=True",
        frozenset({LAYERS}),
        engine={"recompute_attention": True},
        proofs=("tests/engine/test_saved_attention.py",),
        note="without it, gradient checkpointing keeps the outputs of attention",
    ),
    Option(
        "activations kept",
        "prefix_grouper.keep_activations=all",
        frozenset({LAYERS}),
        # The other settings of its own are what it is refused without.
        engine={"keep_activations": "all", "recompute_attention": False},
        model={"enable_gradient_checkpointing": True, "enable_activation_offload": False},
        proofs=("tests/engine/test_kept_layers.py", "tests/engine/test_kept_layers_ranks.py"),
        note="the same with a number of GiB, and with auto",
    ),
    Option(
        "Liger kernels",
        f"{MODEL}.use_liger=True",
        frozenset({LAYERS}),
        model={"use_liger": True},
        needs_gpu=True,
        note="liger-kernel needs Triton",
    ),
    Option(
        "LoRA",
        f"{MODEL}.lora_rank=4",
        frozenset({LAYERS, HEAD, WEIGHTS}),
        model={"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        proofs=(f"{SUPPORT}/test_reference_policy.py::test_lora",),
        note="the reference is the model with its adapter disabled",
    ),
)
