"""Engine config of the shared-prefix engine: verl's FSDP config plus the switches of this plugin."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import FSDPEngineConfig

from verl_pg_plugin.config.attention_kernel import ATTENTION_KERNELS

__all__ = ["PrefixGrouperEngineConfig"]

# FSDPActorConfig writes its own strategy into the engine config after this class is constructed,
# so which of the two keys the worker will look up is not known yet.
_FSDP_STRATEGIES = ("fsdp", "fsdp2")


@dataclass
class PrefixGrouperEngineConfig(FSDPEngineConfig):
    """``FSDPEngineConfig`` of verl 0.9 with the switch of this plugin.

    Args:
        use_prefix_grouper: store and compute every shared prefix once; off runs the stock engine.
        attention_kernel: kernel of packed mode, one of :data:`ATTENTION_KERNELS`.
        logits_chunk_size: rows of logits held at once by the head of packed mode; 0 for all of them.

    Raises:
        ValueError: for an unknown ``attention_kernel``.
        RuntimeError: when ``use_prefix_grouper`` is on and verl would build another engine class.
    """

    use_prefix_grouper: bool = False
    attention_kernel: str = "auto"
    logits_chunk_size: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_kernel not in ATTENTION_KERNELS:
            raise ValueError(
                f"attention_kernel={self.attention_kernel!r} is unknown; choose one of {', '.join(ATTENTION_KERNELS)}"
            )
        if self.use_prefix_grouper:
            from verl_pg_plugin.engine.registration import assert_in_force

            for strategy in _FSDP_STRATEGIES:
                assert_in_force(strategy)
