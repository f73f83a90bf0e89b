"""Load a value model: a checkpoint's token classifier with one label."""

import torch
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)


def load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """Stands in for ``verl.utils.model.load_valuehead_model``; keeps the attention that ``model_config`` names.

    Args:
        local_path: folder of the checkpoint, of the classifier itself or of a causal LM (the head is then new).
        torch_dtype: of the weights.
        model_config: of the checkpoint, ``num_labels`` 1.
        trust_remote_code: the user's own flag.

    Raises:
        ValueError: there is no token classifier for the architecture.
    """
    own_class = trust_remote_code and "AutoModelForTokenClassification" in (
        getattr(model_config, "auto_map", None) or {}
    )
    if not own_class and type(model_config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"transformers has no token classifier for {model_config.model_type!r}, so {local_path} cannot be a value "
            "model; set critic.model.path to a checkpoint of an architecture that has one (qwen3, qwen2, llama, ...)"
        )
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
