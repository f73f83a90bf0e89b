"""What the modes that share prefixes need from options and models, checked before anything is computed."""

import importlib.util
from typing import Any

from tensordict import TensorDict
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, HFModelConfig

from verl_pg_plugin.architectures.checks import (
    REPLACED_ATTENTION,
    Reason,
    class_reasons,
    config_reasons,
    lm_head_reasons,
)
from verl_pg_plugin.engine.batch.sequences import BatchError

OFF = "set actor_rollout_ref.actor.use_prefix_grouper=False"
PACKED = "set model.use_remove_padding=True (packed mode)"


def check_options(engine_config: FSDPEngineConfig, model_config: HFModelConfig) -> None:
    """Reject engine and model options that the mode does not support.

    The validators say the same before Ray starts; this is for engines that are built without them.

    Raises:
        ValueError: one message with all reasons.
        RuntimeError: the padded mode is asked for and upstream's library is not installed.
    """
    qat = getattr(engine_config, "qat", None)
    mtp = getattr(model_config, "mtp", None)
    padded = not model_config.use_remove_padding
    attention = (model_config.override_config or {}).get("attn_implementation")
    options = engine_config.prefix_grouper
    reasons = {
        f"strategy={engine_config.strategy} is not fsdp or fsdp2": engine_config.strategy not in ("fsdp", "fsdp2"),
        f"attn_implementation={attention} would be ignored; set override_config.attn_implementation=sdpa": (
            attention is not None and attention not in REPLACED_ATTENTION
        ),
        "qat.enable=True is not supported; set it to False": bool(qat and qat.enable),
        "mtp.enable=True is not supported; set it to False": bool(mtp and mtp.enable),
        "static_rows=True needs use_dynamic_bsz=True, whose token budget it pads to": (
            options.static_rows and not engine_config.use_dynamic_bsz
        ),
        "compile_layers=True compiles nothing under strategy=fsdp without use_orig_params=True; set it, or fsdp2": (
            options.compile_layers and engine_config.strategy == "fsdp" and not engine_config.use_orig_params
        ),
        f"verify={options.verify} needs model.enable_activation_offload=False, which counts on one forward per step": (
            options.verify != "off" and model_config.enable_activation_offload
        ),
    }
    only_packed = {
        "use_dynamic_bsz=False": engine_config.use_dynamic_bsz,
        "use_fused_kernels=False": model_config.use_fused_kernels,
        "pad_to_length=False": engine_config.pad_to_length,
        "static_rows=False": options.static_rows,
        "compile_layers=False": options.compile_layers,
        "min_dedup_ratio=1": options.min_dedup_ratio != 1,
        "verify=off": options.verify != "off",
    }
    for fix, applies in only_packed.items():
        reasons[f"the padded prefix_grouper mode needs {fix}; or {PACKED}"] = padded and applies
    broken = [reason for reason, applies in reasons.items() if applies]
    if broken:
        raise ValueError("use_prefix_grouper=True: " + "; ".join(broken) + f"; or {OFF}")
    if padded and importlib.util.find_spec("prefix_grouper") is None:
        raise RuntimeError(
            f"the padded prefix_grouper mode needs upstream's library: pip install prefix_grouper; or {PACKED}"
        )


def check_no_dropout(module: nn.Module) -> None:
    """Refuse layers that drop out: rows that samples share would all lose the same numbers.

    Args:
        module: the model with its adapters.

    Raises:
        ValueError: names the layer.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, _DropoutNd) and layer.p > 0:
            raise ValueError(
                f"use_prefix_grouper=True: {name} drops out with p={layer.p}, and samples that share a row would share "
                f"its mask; set lora_dropout of the adapter (or the model's dropout) to 0, or {OFF}"
            )


def check_batch(data: TensorDict) -> None:
    """Refuse what a mini-batch asks for and the engines do not hand out.

    Raises:
        BatchError: distillation.
    """
    for name in ("distillation_use_topk", "distillation_only"):
        if tu.get_non_tensor_data(data, name, default=False):
            raise BatchError(f"{name}: shared prefixes do not support distillation; set distillation.enabled=False")


def check_model(module: Any) -> None:
    """Reject models whose attention cannot be replaced.

    Raises:
        ValueError: names the architecture and the reason.
    """
    _reject(module, config_reasons(module.config) + class_reasons(type(module)))


def check_lm_head(module: Any) -> None:
    """Reject language models whose head cannot run on response rows only.

    Raises:
        ValueError: names the architecture and the reason.
    """
    _reject(module, lm_head_reasons(type(module)))


def _reject(module: nn.Module, reasons: list[Reason]) -> None:
    if reasons:
        causes = "; ".join(f"{reason.why} ({reason.fix})" if reason.fix else reason.why for reason in reasons)
        raise ValueError(f"prefixes cannot be shared in {type(module).__name__}: {causes}; {OFF}")
