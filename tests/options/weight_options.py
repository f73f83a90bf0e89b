"""How weights are sharded and moved, and in which precision they compute."""

from tests.options.keys import ACTOR, FSDP, PRECISION, STEPS, SUPPORT
from tests.options.option import Option, Place

WEIGHTS = Place.WEIGHTS

WEIGHT_OPTIONS: tuple[Option, ...] = (
    # Weights.
    Option(
        "parameter offload",
        f"{FSDP}.param_offload=True",
        frozenset({WEIGHTS}),
        engine={"param_offload": True},
        note="on GPUs whose number divides every parameter, see docs/benchmarks.md",
    ),
    Option(
        "optimizer offload",
        f"{FSDP}.optimizer_offload=True",
        frozenset({WEIGHTS}),
        engine={"optimizer_offload": True},
    ),
    Option(
        "FSDP2 offload policy",
        f"{FSDP}.offload_policy=True",
        frozenset({WEIGHTS}),
        engine={"offload_policy": True},
    ),
    Option(
        "weights kept after the forward",
        f"{FSDP}.reshard_after_forward=False",
        frozenset({WEIGHTS}),
        engine={"reshard_after_forward": False},
        proofs=(f"{STEPS}/test_carry.py::test_carried_groups_stay_exact_with[every micro-batch is reduced",),
    ),
    Option(
        "gradients reduced after every micro-batch",
        f"{FSDP}.use_no_sync_for_gradient_accumulation=False",
        frozenset({WEIGHTS}),
        engine={"use_no_sync_for_gradient_accumulation": False},
        proofs=(f"{STEPS}/test_carry.py::test_carried_groups_stay_exact_with[every micro-batch is reduced",),
    ),
    Option(
        "FSDP2",
        f"{ACTOR}.strategy=fsdp2",
        frozenset({WEIGHTS}),
        proofs=("tests/engine/test_two_ranks.py::test_gradients", f"{STEPS}/test_carry_ranks.py::test_ranks_with"),
        note="1, 2 and 4 processes",
    ),
    Option(
        "FSDP1",
        f"{ACTOR}.strategy=fsdp",
        frozenset({WEIGHTS}),
        engine={"strategy": "fsdp", "use_orig_params": True},
        needs_gpu=True,
        proofs=(
            "tests/engine/test_gpu.py::test_bf16_error_is_at_most_that_of_stock_rmpad[whole head-fsdp]",
            "tests/engine/test_gpu.py::test_flat_parameters",
            f"{STEPS}/test_carry_ranks.py::test_ranks_with_unequal_numbers_of_oversized_groups_are_exact[fsdp-",
        ),
        note="FSDP1 refuses models on a CPU; there two processes with that check taken out",
    ),
    Option(
        "hybrid sharding",
        f"{FSDP}.fsdp_size=2",
        frozenset({WEIGHTS}),
        engine={"fsdp_size": 2},
        proofs=(f"{STEPS}/test_carry_ranks.py::test_sequence_and_data_parallel_ranks_carry_together",),
        num_ranks=4,
    ),
    Option(
        "mixed precision bf16",
        f"+{FSDP}.mixed_precision={{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}}",
        proofs=(f"{PRECISION}[bf16", "tests/engine/test_gpu.py"),
        note="error against float32 at most 1.1 times that of stock rmpad",
    ),
    Option(
        "mixed precision fp16",
        f"+{FSDP}.mixed_precision={{param_dtype: fp16, reduce_dtype: fp32, buffer_dtype: fp32}}",
        proofs=(f"{PRECISION}[fp16", f"{SUPPORT}/test_gpu.py::test_fp16"),
        note="error against float32 at most 1.1 times that of stock rmpad",
    ),
)
