"""What packed mode refuses by name before anything is computed."""

from verl.workers.config.engine import QATEngineConfig
from verl.workers.config.model import MtpConfig

from tests.options.keys import ACTOR, MODEL, RULES
from tests.options.option import Option

ARCHITECTURES = "tests/config/test_checkpoint_checks.py::test_architectures_that_would_be_computed_wrongly_are_refused"

REJECTED_OPTIONS: tuple[Option, ...] = (
    # Refused before anything starts.
    Option(
        "distillation",
        "distillation.enabled=True",
        rejected=True,
        proofs=(f"{RULES}[distillation-packed",),
        note="top-k too: teacher log-probs follow the unshared token order",
    ),
    Option(
        "multi-token prediction",
        f"{MODEL}.mtp.enable=True",
        rejected=True,
        model={"mtp": MtpConfig(enable=True)},
        proofs=(f"{RULES}[multi_token_prediction-packed",),
        note="its heads read several rows ahead, across the fork of a group",
    ),
    Option(
        "quantization-aware training",
        f"{ACTOR}.qat.enable=True",
        rejected=True,
        engine={"qat": QATEngineConfig(enable=True)},
        proofs=(f"{RULES}[quantization_aware_training-packed",),
        note="not verified with shared prefixes",
    ),
    Option(
        "multimodal checkpoints and batches",
        "(a checkpoint that takes images, audio or video)",
        rejected=True,
        proofs=(
            f"{ARCHITECTURES}[qwen2_vl",
            f"{ARCHITECTURES}[gemma3",
            "tests/engine/batch/test_bad_batches.py::test_multimodal_rows",
            "tests/engine/batch/test_bad_batches.py::test_error_names_the_cause[mrope",
        ),
        note="but for pictures in Qwen2.5-VL, Qwen3-VL and Qwen3.5",
    ),
    Option(
        "VeOmni, Megatron, torchtitan and other engines",
        "model_engine=megatron",
        rejected=True,
        proofs=(f"{RULES}[fsdp_strategy-packed",),
        note="fsdp and fsdp2 only",
    ),
    Option(
        "context parallelism (ring attention)",
        f"+{ACTOR}.megatron.context_parallel_size=2",
        rejected=True,
        proofs=(f"{RULES}[ring_attention-packed",),
        note="Ulysses instead",
    ),
    Option(
        "attention dropout",
        f"+{MODEL}.override_config.attention_dropout=0.1",
        rejected=True,
        model={"override_config": {"attn_implementation": "sdpa", "attention_dropout": 0.1}},
        proofs=("tests/engine/test_mode_errors.py::test_attention_dropout",),
        note="a shared prefix would draw its random numbers once for all its responses",
    ),
    Option(
        "other attention implementations",
        f"+{MODEL}.override_config.attn_implementation=flex_attention",
        rejected=True,
        model={"override_config": {"attn_implementation": "flex_attention"}},
        proofs=(f"{RULES}[attn_implementation-packed",),
        note="sdpa and flash_attention_2 are replaced; prefix_grouper.attention_kernel selects the kernel",
    ),
)
