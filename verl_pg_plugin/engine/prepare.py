"""Select the kernel, check a transformers model, and prepare it for shared prefixes."""

import hashlib
import logging
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification, PretrainedConfig
from verl.utils.device import get_device_name

from verl_pg_plugin.architectures import OVERRIDE, class_issues, config_issues, keyword_issues
from verl_pg_plugin.attention.context import ForwardContext
from verl_pg_plugin.attention.interface import ATTENTION_NAME
from verl_pg_plugin.attention.kernels import ATTENTION_KERNEL, Kernel, select_kernel
from verl_pg_plugin.config.compile import COMPILE_LAYERS, layer_compilation
from verl_pg_plugin.config.mode import Engine
from verl_pg_plugin.config.rules import check_engine
from verl_pg_plugin.engine.compiled_layers import compile_layers
from verl_pg_plugin.engine.ranks import gather, gather_or_raise
from verl_pg_plugin.issue import SHARING_OFF, Issue
from verl_pg_plugin.mixers import MIXERS, count_layers
from verl_pg_plugin.mixers.attention import attention_needs
from verl_pg_plugin.modalities import Modality
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.tested import untested_part

logger = logging.getLogger(__name__)


class RanksDifferError(RuntimeError):
    """Ranks selected other kernels or compile modes because their machines differ; raised on every rank."""


def select_on_all_ranks(engine_config: Any, model_config: Any) -> tuple[Kernel, bool, str]:
    """Return the attention kernel, True if decoder layers are compiled, and the reasons; equal on all ranks.

    Both depend on the packages of a machine. Other kernels would return other log-probs, and uncompiled layers on one
    rank would slow down all. Raises ValueError or RuntimeError for an unsupported option or a missing kernel.
    """
    with gather_or_raise() as ranks:
        check_engine(engine_config, model_config)
        needs = attention_needs(model_config.hf_config.get_text_config())
        kernel = select_kernel(engine_config.prefix_grouper.attention_kernel, get_device_name(), needs)
        compiles, why_layers = layer_compilation(Engine.of(engine_config, model_config))
        layers = "layers compiled" if compiles else "layers not compiled"
        why = f"attention kernel {kernel.name} ({kernel.reason}); {layers} ({why_layers})"
        ranks.append((kernel.name, compiles, f"{platform.node()} has {why}"))
    if len({(name, compiled) for name, compiled, _ in ranks}) > 1:
        choices = [choice for _, _, choice in ranks]
        ranks_of = {choice: [rank for rank, other in enumerate(choices) if other == choice] for choice in choices}
        raise RanksDifferError(
            "ranks decided differently, as their machines differ: "
            f"{'; '.join(f'{choice} on ranks {those}' for choice, those in ranks_of.items())}. Fix: install the same "
            f"packages on all machines, or set {ATTENTION_KERNEL}=<one that all can run> and {COMPILE_LAYERS}=False"
        )
    if compiles:  # gradients of queries, keys and values must have the strides of the compiled forward's outputs
        kernel = replace(kernel, heads_first=True)
    return kernel, compiles, why


@dataclass(frozen=True)
class SharedModel:
    """Properties of the model that an engine has built."""

    name: str
    layers: Counter[str]  # by the name of their mixer
    flops: ModelFlops
    prefix_cache: bool  # every layer can read tokens that another micro-batch has computed
    untested: str = ""  # why no test compares this model with single sequences; empty if one does

    def check_every_layer_mixed(self, context: ForwardContext) -> None:
        """Raise RuntimeError if layers mixed tokens by other means in the forward that ``context`` was made for."""
        for mixer, num_layers in self.layers.items():
            if (calls := context.calls[mixer]) != num_layers:
                raise RuntimeError(
                    f"{mixer} over shared prefixes ran in {calls} of {num_layers} layers of {self.name}: its other "
                    f"layers mix tokens in a way that is not supported. Fix: {SHARING_OFF}"
                )


def prepare_config(config: PretrainedConfig) -> None:
    """Change the config from which a model is built; encoders keep their attention."""
    text = config.get_text_config()
    parts = [(name, getattr(config, name, None)) for name in config.sub_configs]
    kept = {name: part._attn_implementation for name, part in parts if part is not None and part is not text}
    for name in count_layers(text):
        MIXERS[name].prepare(config)
    if kept:
        config._attn_implementation = {"": config._attn_implementation, **kept}


def prepare_model(module: Any, modality: Modality, *, compiles: bool, recomputed: bool = False) -> SharedModel:
    """Install the mixers in an unwrapped model built from a prepared config, and compile its layers if ``compiles``.

    ``recomputed`` layers run a second time in the backward. An unsupported model is a ValueError.
    """
    issues = config_issues(module.config) + class_issues(type(module))
    refuse(module, issues or keyword_issues(type(module.base_model)))
    untested = untested_part(module)  # before mixers replace parts of it
    layers = count_layers(module.config.get_text_config())
    if not layers:  # nothing would be replaced or checked
        why = "its config does not say how many layers it has"
        refuse(module, [Issue("", why, f"++{OVERRIDE}.num_hidden_layers=<its layers>")])
    for name in layers:
        MIXERS[name].install(module)
    modality.install(module)
    if compiles:
        compile_layers(module, recomputed=recomputed)
    # The prefix cache is keyed by layer index, so a layer that runs twice in a forward cannot use it.
    indices = {getattr(part, "layer_idx", None) for part in module.modules()} - {None}
    caches = len(indices) >= layers.total() and all(MIXERS[name].prefix_cache for name in layers)
    return SharedModel(type(module).__name__, layers, ModelFlops.or_tokens(lambda: module), caches, untested)


@contextmanager
def own_attention_refused(model: str) -> Iterator[None]:
    """Raise ValueError if a class that is built or runs in this block has its own attention table or signature."""
    try:
        yield
    except (AssertionError, AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        if ATTENTION_NAME in str(error):
            why, fix = "looks attention up in its own table", "let it call transformers' ALL_ATTENTION_FUNCTIONS"
        elif "unexpected keyword argument 'prefix_grouper'" in str(error):
            why, fix = "does not hand **kwargs to its attention", "accept **kwargs in its layers and attention"
        else:
            raise
        raise ValueError(
            f"prefixes cannot be shared in {model}: its class {why}. Fix: {fix}, or {SHARING_OFF}"
        ) from error


def refuse(module: nn.Module, issues: list[Issue]) -> None:
    """Raise ValueError with the name of a model's class if there are any ``issues``."""
    if issues:
        causes = "; ".join(f"{issue.why} ({issue.fix})" if issue.fix else issue.why for issue in issues)
        raise ValueError(f"prefixes cannot be shared in {type(module).__name__}: {causes}. Fix: {SHARING_OFF}")


def check_no_dropout(module: nn.Module) -> None:
    """Raise ValueError for dropout in a model or its adapters: samples would share the mask of a shared token."""
    for name, layer in module.named_modules():
        if isinstance(layer, _DropoutNd) and layer.p > 0:
            raise ValueError(
                f"use_prefix_grouper=True: {name} drops out with p={layer.p}, and samples that share a token would "
                f"share its mask. Fix: set lora_dropout of the adapter (or the model's dropout) to 0, or {SHARING_OFF}"
            )


def check_parameter_order(module: nn.Module) -> None:
    """Raise ValueError on all ranks if their parameters differ in name or order: FSDP exchanges them by position."""
    names = "\n".join(name for name, _ in module.named_parameters())
    if len(set(gather(hashlib.sha256(names.encode()).hexdigest()))) > 1:
        raise ValueError(
            f"{type(module).__name__}: ranks have other parameters or another order of them, and FSDP exchanges them "
            "by position. Fix: register its modules in one order, for example from a list instead of a set"
        )


def order_buffers(module: nn.Module) -> None:
    """Sort the buffers of every part of a model by name, in place.

    FSDP1 copies rank 0's buffers to other ranks by their order. transformers registers the rotary frequencies of
    several layer types in the order of a set, which differs between processes.
    """
    for part in module.modules():
        for name in sorted(part._buffers):
            part._buffers[name] = part._buffers.pop(name)


def load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> Any:
    """Load a token classifier with one label; raise ValueError if the architecture has none.

    ``local_path`` is verl's local copy of ``critic.model.path``. The head is new if ``local_path`` holds a causal LM.
    """
    own_class = "AutoModelForTokenClassification" in (getattr(model_config, "auto_map", None) or {})
    if not (own_class and trust_remote_code) and type(model_config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"critic.model.path (read from {local_path}): transformers has no token classifier for "
            f"{model_config.model_type!r}. Fix: set critic.model.path to a checkpoint of an architecture that has one "
            "(qwen3, qwen2, llama, ...)"
        )
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
