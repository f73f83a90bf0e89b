"""Make an unwrapped transformers model run over shared rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from verl_pg_plugin.attention.op import checkpoint_contexts
from verl_pg_plugin.config.options import PrefixGrouperOptions
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.engine.compiled_layers import compile_layers, decoder_layers
from verl_pg_plugin.engine.forward_rows import ForwardRows
from verl_pg_plugin.engine.requirements import SHARING_OFF, check_model
from verl_pg_plugin.mixers import MIXERS, count_layers
from verl_pg_plugin.modalities import Modality

if TYPE_CHECKING:
    from verl_pg_plugin.engine.sharing_modes import SharingMode


@dataclass(frozen=True)
class SharedModel:
    """What an engine remembers of the model that it built.

    Attributes:
        name: its class.
        layers: how many of its layers each mixer computes, by the mixer's name.
        flops: its cost.
    """

    name: str
    layers: Counter[str]
    flops: ModelFlops
    kept_layers: None = None

    @property
    def num_layers(self) -> int:
        return self.layers.total()

    @property
    def carries(self) -> bool:
        """Whether every layer reads rows that another micro-batch has computed."""
        return all(MIXERS[name].carries for name in self.layers)

    def check_every_layer_mixed(self, rows: ForwardRows) -> None:
        """Raise RuntimeError if layers mixed tokens by other means in the forward of ``rows``."""
        for mixer, num_layers in self.layers.items():
            calls = rows.shared.calls[mixer]
            if calls != num_layers:
                raise RuntimeError(
                    f"{mixer} over shared prefixes ran in {calls} of {num_layers} layers of {self.name}: its other "
                    f"layers mix tokens in a way that is not supported; {SHARING_OFF}"
                )


def prepare_config(config: PretrainedConfig, modality: Modality) -> None:
    """Change the config from which a model is built; its towers keep the attention that was asked for."""
    kept = {tower: getattr(config, tower)._attn_implementation for tower in modality.towers}
    for name in count_layers(config.get_text_config()):
        MIXERS[name].prepare(config)
    if kept:
        config._attn_implementation = {"": config._attn_implementation, **kept}


def prepare_model(module: Any, mode: SharingMode, options: PrefixGrouperOptions) -> SharedModel:
    """Let the mixers take over, compile and checkpoint as asked.

    Args:
        module: built from a config that went through ``prepare_config``.

    Raises:
        ValueError: the model cannot run over shared rows.
    """
    check_model(module)
    config = module.config.get_text_config()
    layers = count_layers(config)
    for name in layers:
        if mode.sp_size > 1 and not MIXERS[name].spreads_over_ranks:
            raise ValueError(
                f"{name} layers of {type(module).__name__} do not mix rows that are spread over ranks; set "
                f"ulysses_sequence_parallel_size=1, or {SHARING_OFF}"
            )
        MIXERS[name].install(module)
    mode.modality.install(module)
    if options.compile_layers:
        compile_layers(module, dynamic=not options.static_rows, recomputed=module.is_gradient_checkpointing)
    if module.is_gradient_checkpointing:
        for layer in decoder_layers(module):
            if getattr(layer, "_gradient_checkpointing_func", None) is not None:
                layer._gradient_checkpointing_func = partial(
                    checkpoint, use_reentrant=False, context_fn=checkpoint_contexts
                )
    return SharedModel(type(module).__name__, layers, ModelFlops.of(module))
