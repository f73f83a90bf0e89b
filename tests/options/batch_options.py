"""How a mini-batch is cut, and how the rows of a forward are laid out."""

from tests.options.keys import ACTOR, FSDP, STEPS
from tests.options.option import Option, Place

CUT, ROWS, HEAD, LAYERS, WEIGHTS = Place.CUT, Place.ROWS, Place.HEAD, Place.LAYERS, Place.WEIGHTS

BATCH_OPTIONS: tuple[Option, ...] = (
    # Micro-batches.
    Option(
        "dynamic batch size",
        f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=16384",
        frozenset({CUT}),
        engine={"use_dynamic_bsz": True},
        batch={"use_dynamic_bsz": True, "max_token_len_per_gpu": 45},
        proofs=("tests/engine/test_two_ranks.py::test_gradients_of_two_ranks", "tests/batching/test_micro_batches.py"),
        note="the budget counts deduplicated tokens",
    ),
    Option(
        "a group larger than the token budget",
        f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=4096",
        frozenset({CUT, ROWS, HEAD, LAYERS}),
        engine={"use_dynamic_bsz": True},
        batch={"use_dynamic_bsz": True, "max_token_len_per_gpu": 38},
        carries=True,
        proofs=tuple(f"{STEPS}/test_carry{name}.py" for name in ("", "_gpu", "_models", "_ranks")),
        note="its parts hand on what they share (`prefix_grouper.carry`)",
    ),
    Option(
        "fixed micro-batch size",
        f"{ACTOR}.use_dynamic_bsz=False {ACTOR}.ppo_micro_batch_size_per_gpu=2",
        frozenset({CUT, ROWS}),
        engine={"use_dynamic_bsz": False},
        batch={"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
        proofs=(
            "tests/engine/test_two_ranks.py::test_gradients_of_two_ranks_equal_the_rows_alone[by_sequences",
            f"{STEPS}/test_carry.py::test_groups_above_a_number_of_sequences",
        ),
    ),
    Option(
        "auto gate",
        "prefix_grouper.min_dedup_ratio=1.5",
        frozenset({CUT, ROWS}),
        engine={"min_dedup_ratio": 1.5},
        proofs=("tests/engine/test_gate.py",),
        note="micro-batches that share less run as plain rmpad",
    ),
    Option(
        "verify mode",
        "prefix_grouper.verify=every_n prefix_grouper.verify_every=1",
        frozenset({CUT, ROWS, HEAD, LAYERS}),
        engine={"verify": "every_n", "verify_every": 1},
        refuses=frozenset({"activation offload"}),
        proofs=(
            f"{STEPS}/test_verify.py",
            f"{STEPS}/test_faults.py",
            f"{STEPS}/test_fallback.py",
            f"{STEPS}/test_token_comparison.py",
        ),
        note="recomputes some rows alone and compares",
    ),
    Option(
        "balanced batches",
        "trainer.balance_batch=True",
        proofs=("tests/batching/test_balance.py", "tests/trainer/test_v1.py"),
        note="groups stay whole; balanced by deduplicated cost",
    ),
    # Rows of a forward.
    Option(
        "pad_to_length",
        f"{ACTOR}.pad_to_length=True {FSDP}.pad_to_length_bucket=1024",
        frozenset({ROWS}),
        engine={"pad_to_length": True, "pad_to_length_bucket": 64},
    ),
    Option(
        "static rows",
        f"prefix_grouper.static_rows=True {ACTOR}.use_dynamic_bsz=True",
        frozenset({CUT, ROWS}),
        engine={"static_rows": True, "use_dynamic_bsz": True},
        note="every micro-batch is padded to its token budget; needs use_dynamic_bsz=True",
    ),
    Option(
        "Ulysses sequence parallelism, 2 ranks",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        frozenset({CUT, ROWS, HEAD, WEIGHTS}),
        engine={"ulysses_sequence_parallel_size": 2},
        num_ranks=2,
        proofs=("tests/models/test_ulysses.py",),
    ),
    Option(
        "Ulysses sequence parallelism, 4 ranks",
        f"{ACTOR}.ulysses_sequence_parallel_size=4",
        frozenset({CUT, ROWS, HEAD, WEIGHTS}),
        engine={"ulysses_sequence_parallel_size": 4},
        num_ranks=4,
        proofs=("tests/models/test_ulysses.py",),
        note="also with fewer key-value heads than ranks",
    ),
)
