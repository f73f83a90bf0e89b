"""Decoder layers under ``torch.compile``: everything between the attention calls, fused by the compiler."""

from typing import Any

from torch import nn


def compile_layers(module: Any, dynamic: bool) -> list[nn.Module]:
    """Compile every decoder layer in place, when it first runs.

    Layers are compiled one by one and not the model as a whole, so that FSDP can gather and free each one's weights
    and gradient checkpointing can recompute it. Attention stays outside (``attention.interface``): its index maps
    differ in every micro-batch.

    Args:
        module: an unwrapped transformers model.
        dynamic: the number of rows differs between micro-batches.

    Returns:
        The layers.

    Raises:
        ValueError: the model does not say which of its modules are layers.
    """
    layers = decoder_layers(module)
    if not layers:
        raise ValueError(
            f"{type(module).__name__} names no decoder layers in _no_split_modules; set "
            "prefix_grouper.compile_layers=False"
        )
    for layer in layers:
        layer.compile(dynamic=dynamic)
    return layers


def decoder_layers(module: Any) -> list[nn.Module]:
    """Layers of a transformers model, in the order of its modules; empty where it does not say which they are."""
    names = set(module._no_split_modules or ())
    return [layer for layer in _text_part(module).modules() if type(layer).__name__ in names] if names else []


def _text_part(module: Any) -> Any:
    """All but the towers of a multimodal model, whose blocks see pictures of any size and are few beside the layers."""
    return module if module.config.get_text_config() is module.config else module.get_decoder()
