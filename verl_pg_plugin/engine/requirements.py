"""What packed mode needs from options and models, checked before anything is computed."""

import inspect

from torch import nn
from verl.workers.config import FSDPEngineConfig, HFModelConfig

OFF = "set actor_rollout_ref.actor.use_prefix_grouper=False"


def check_options(engine_config: FSDPEngineConfig, model_config: HFModelConfig) -> None:
    """Reject engine and model options that packed mode does not support.

    The validators say the same before Ray starts; this is for engines that are built without them.

    Raises:
        ValueError: one message with all reasons.
    """
    qat = getattr(engine_config, "qat", None)
    mtp = getattr(model_config, "mtp", None)
    reasons = {
        "model.use_remove_padding=False selects the padded PrefixGrouper mode, which is not supported yet; "
        "set model.use_remove_padding=True": not model_config.use_remove_padding,
        f"strategy={engine_config.strategy} is not fsdp or fsdp2": engine_config.strategy not in ("fsdp", "fsdp2"),
        "ulysses_sequence_parallel_size > 1 is not supported yet; set it to 1": (
            engine_config.ulysses_sequence_parallel_size > 1
        ),
        "use_fused_kernels=True is not supported yet; set model.use_fused_kernels=False": (
            model_config.use_fused_kernels
        ),
        "pad_to_length=True is not supported yet; set it to False": engine_config.pad_to_length,
        "qat.enable=True is not supported; set it to False": bool(qat and qat.enable),
        "mtp.enable=True is not supported; set it to False": bool(mtp and mtp.enable),
    }
    broken = [reason for reason, applies in reasons.items() if applies]
    if broken:
        raise ValueError("use_prefix_grouper=True: " + "; ".join(broken) + f"; or {OFF}")


def check_model(module: nn.Module) -> None:
    """Reject models whose attention packed mode cannot take over.

    Raises:
        ValueError: names the architecture and the reason.
    """
    config = module.config.get_text_config()
    reasons = []
    if not getattr(module, "_supports_attention_backend", False):
        reasons.append("it does not call attention through transformers' AttentionInterface")
    if hasattr(module.config, "vision_config") or hasattr(module.config, "audio_config"):
        reasons.append("it is multimodal")
    if getattr(module.config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder")
    if any("linear" in kind or "mamba" in kind for kind in getattr(config, "layer_types", None) or ()):
        reasons.append("it has linear-attention layers")
    if getattr(config, "attention_dropout", 0.0):
        reasons.append(f"attention_dropout is {config.attention_dropout}; set override_config.attention_dropout=0")
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        reasons.append("its forward has no logits_to_keep")
    if reasons:
        raise ValueError(f"packed mode cannot run {type(module).__name__}: {'; '.join(reasons)}; {OFF}")
