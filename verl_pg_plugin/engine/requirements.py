"""What the modes that share prefixes need from options and models, checked before anything is computed."""

from typing import Any

from tensordict import TensorDict
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.architectures import class_issues, config_issues, lm_head_issues
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.modalities.batch_error import SHARING_OFF, BatchError


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
                f"its mask; set lora_dropout of the adapter (or the model's dropout) to 0, or {SHARING_OFF}"
            )


def check_batch(data: TensorDict) -> None:
    """Refuse what a mini-batch asks for and the engines do not hand out.

    Raises:
        BatchError: distillation, or no mask of what the loss counts.
    """
    if "loss_mask" not in data:
        raise BatchError("the batch has no loss_mask, whose ones verl sums over ranks; add it, as verl's trainers do")
    for name in ("distillation_use_topk", "distillation_only"):
        if tu.get_non_tensor_data(data, name, default=False):
            raise BatchError(f"{name}: shared prefixes do not support distillation; set distillation.enabled=False")


def check_model(module: Any) -> None:
    """Reject models whose attention cannot be replaced.

    Raises:
        ValueError: names the architecture and the reason.
    """
    _reject(module, config_issues(module.config) + class_issues(type(module)))


def check_lm_head(module: Any) -> None:
    """Reject language models whose head cannot run on response rows only.

    Raises:
        ValueError: names the architecture and the reason.
    """
    _reject(module, lm_head_issues(type(module)))


def _reject(module: nn.Module, reasons: list[Issue]) -> None:
    if reasons:
        causes = "; ".join(f"{reason.why} ({reason.fix})" if reason.fix else reason.why for reason in reasons)
        raise ValueError(f"prefixes cannot be shared in {type(module).__name__}: {causes}; {SHARING_OFF}")
