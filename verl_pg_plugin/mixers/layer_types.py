"""How the layers of a config mix tokens."""

from transformers import PretrainedConfig

FULL, SLIDING, LINEAR, MAMBA2 = "full_attention", "sliding_attention", "linear_attention", "mamba2"
MAMBA2_MODEL_TYPES = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"})
_OF_MAMBA2_MODELS = {
    **dict.fromkeys(("attention", FULL), (FULL,)),
    **dict.fromkeys(("mamba", LINEAR), (MAMBA2,)),  # the latter since transformers 5.15
    "hybrid": (MAMBA2, FULL),
    **dict.fromkeys(("mlp", "moe"), ()),
}
"""Types by entry of ``layer_types``. In other models the same entries are other layers."""


def layer_types(config: PretrainedConfig) -> list[str]:
    """Return the type of each layer that mixes tokens, or two types if it mixes them in two ways.

    Without ``layer_types``, ``sliding_window`` applies to all (Mistral, Phi3).
    """
    num_layers = getattr(config, "num_hidden_layers", 0)
    if not isinstance(num_layers, int):  # LXMERT has three encoders
        return []
    if types := getattr(config, "layer_types", None):
        types = list(types)[:num_layers]
        if config.model_type in MAMBA2_MODEL_TYPES:
            return [mixed for layer in types for mixed in _OF_MAMBA2_MODELS.get(layer, (layer,))]
        return types
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return [SLIDING if sliding else FULL] * num_layers
