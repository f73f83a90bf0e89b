"""Engine config of the shared-prefix engine: verl's FSDP config plus the switches of this plugin."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.base_config import BaseConfig
from verl.workers.config import FSDPEngineConfig

from verl_pg_plugin.attention.kernels.specs import ATTENTION_KERNELS

__all__ = ["PrefixGrouperEngineConfig", "PrefixGrouperOptions"]

# FSDPActorConfig writes its own strategy into the engine config after this class is constructed,
# so which of the two keys the worker will look up is not known yet.
_FSDP_STRATEGIES = ("fsdp", "fsdp2")


@dataclass
class PrefixGrouperOptions(BaseConfig):
    """The section ``prefix_grouper`` of the trainer's config; every engine gets the same.

    Args:
        attention_kernel: kernel of packed mode, one of :data:`ATTENTION_KERNELS`.
        logits_chunk_size: rows of logits that the head of packed mode holds at once, or up to twice as many uncut;
            0 for all of them.
        static_rows: pad every micro-batch of packed mode to its token budget, so that compiled code sees one shape.
        compile_layers: ``torch.compile`` every decoder layer, around attention.
        recompute_attention: gradient checkpointing runs the attention kernel again in the backward; False keeps its
            output, which takes about as much memory as the hidden states that are kept anyway.
        min_dedup_ratio: a micro-batch of packed mode that would share less than this (logical over physical tokens)
            runs as plain rmpad; 1 lets all of them share.
        verify: recompute some samples of live micro-batches alone and compare: off, first or every_n.
        verify_every: n of ``verify=every_n``, in micro-batches.
        verify_rows: samples to recompute in each.
        verify_tolerance: largest error per token, relative to the larger of 1 and the value; None for one that is
            measured in the run (``engine.steps.token_comparison``).
        on_mismatch: raise, or go on as rmpad.
        carry: auto lets groups of packed mode that exceed a micro-batch go on in the next where that is cheaper; never
            computes what they share again in each.

    Raises:
        ValueError: for a value outside these.
    """

    attention_kernel: str = "auto"
    logits_chunk_size: int = 2048
    static_rows: bool = False
    compile_layers: bool = False
    recompute_attention: bool = False
    min_dedup_ratio: float = 1.0
    verify: str = "off"
    verify_every: int = 100
    verify_rows: int = 2
    verify_tolerance: float | None = None
    on_mismatch: str = "raise"
    carry: str = "auto"

    def __post_init__(self) -> None:
        choices = {
            "attention_kernel": ATTENTION_KERNELS,
            "verify": ("off", "first", "every_n"),
            "on_mismatch": ("raise", "rmpad"),
            "carry": ("auto", "never"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"prefix_grouper.{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(known)}"
                )
        at_least = {"logits_chunk_size": 0, "min_dedup_ratio": 1, "verify_every": 1, "verify_rows": 1}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(
                    f"prefix_grouper.{name}={getattr(self, name)} is below {least}; set it to at least that"
                )
        if self.verify_tolerance is not None and self.verify_tolerance <= 0:
            raise ValueError(
                f"prefix_grouper.verify_tolerance={self.verify_tolerance} lets nothing pass; set it above 0, or to null"
            )
        if self.static_rows and self.on_mismatch == "rmpad":
            raise ValueError(
                "prefix_grouper.on_mismatch=rmpad needs more rows than prefix_grouper.static_rows=True has; set "
                "prefix_grouper.on_mismatch=raise"
            )


@dataclass
class PrefixGrouperEngineConfig(FSDPEngineConfig):
    """``FSDPEngineConfig`` of verl 0.9 with the switch of this plugin.

    Args:
        use_prefix_grouper: store and compute every shared prefix once; off runs the stock engine.
        prefix_grouper: how.

    Raises:
        RuntimeError: when ``use_prefix_grouper`` is on and verl would build another engine class.
    """

    use_prefix_grouper: bool = False
    prefix_grouper: PrefixGrouperOptions = field(default_factory=PrefixGrouperOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_prefix_grouper:
            from verl_pg_plugin.engine.registration import assert_in_force

            for strategy in _FSDP_STRATEGIES:
                assert_in_force(strategy)
