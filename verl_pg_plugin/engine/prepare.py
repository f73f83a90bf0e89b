"""Build what an engine runs: choices of a machine, checks, and a transformers model over shared prefixes."""

from __future__ import annotations

import logging
import platform
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from verl.utils.device import get_device_name

from verl_pg_plugin.architectures import class_issues, config_issues
from verl_pg_plugin.attention.context import AttentionContext
from verl_pg_plugin.attention.kernels import ATTENTION_KERNEL, Kernel, select_kernel
from verl_pg_plugin.config.compile import COMPILE_LAYERS, layer_compilation
from verl_pg_plugin.config.mode import Engine
from verl_pg_plugin.config.rules import check_engine
from verl_pg_plugin.engine.compiled_layers import compile_layers
from verl_pg_plugin.engine.ranks import Agreement
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.mixers import MIXERS, count_layers
from verl_pg_plugin.mixers.attention import attention_needs
from verl_pg_plugin.modalities import SHARING_OFF, Modality
from verl_pg_plugin.planning.cost import ModelFlops

logger = logging.getLogger(__name__)


class RanksDifferError(RuntimeError):
    """Ranks decided differently, because their machines differ."""


@dataclass(frozen=True)
class Choices:
    """What depends on what a machine has installed; the same on every rank.

    Attributes:
        kernel: the attention kernel.
        compiles: whether decoder layers are compiled.
        why: reasons of both, for the log.
    """

    kernel: Kernel
    compiles: bool
    why: str


def choose_alike(engine_config: Any, model_config: Any) -> Choices:
    """Choose on this machine, and go on if every rank has chosen the same.

    With other kernels the log-probs of ranks would differ; where one rank compiles nothing, all others wait for it.

    Args:
        engine_config: a ``PrefixGrouperEngineConfig``.
        model_config: verl's ``HFModelConfig``.

    Raises:
        ValueError, RuntimeError: an option that the mode does not support, or no kernel; on the other ranks a
            ``RankError``.
        RanksDifferError: on every rank; names ranks, choices, reasons and the overrides that fix it.
    """
    with Agreement() as ranks:
        check_engine(engine_config, model_config)
        needs = attention_needs(model_config.hf_config.get_text_config())
        kernel = select_kernel(engine_config.prefix_grouper.attention_kernel, get_device_name(), needs)
        compiles, why_layers = layer_compilation(Engine.of(engine_config, model_config))
        layers = "layers compiled" if compiles else "layers not compiled"
        ranks.tell((platform.node(), (kernel.name, kernel.reason), (layers, why_layers)))
    hosts, kernels, compilers = zip(*ranks.told, strict=True)
    found = []
    for what, choices, fix in (
        ("attention kernels: ", kernels, f"++{ATTENTION_KERNEL}=<one that all can run>"),
        ("", compilers, f"++{COMPILE_LAYERS}=False"),
    ):
        if len({name for name, _ in choices}) > 1:
            each = [
                f"{name} on rank {rank} of {hosts[rank]} ({why})"
                for rank, (name, why) in enumerate(choices)
                if (name, why) not in choices[:rank]
            ]
            found.append(f"{what}{', '.join(each)}; give all machines what some lack, or set {fix}")
    if found:
        raise RanksDifferError(f"ranks decided differently, as their machines differ: {'; '.join(found)}")
    return Choices(kernel, compiles, f"attention kernel {kernel.name} ({kernel.reason}); {layers} ({why_layers})")


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

    @property
    def prefix_cache(self) -> bool:
        """Whether every layer reads tokens that another micro-batch has computed."""
        return all(MIXERS[name].prefix_cache for name in self.layers)

    def check_every_layer_mixed(self, context: AttentionContext) -> None:
        """Raise RuntimeError if layers mixed tokens by other means in the forward that ``context`` was made for."""
        for mixer, num_layers in self.layers.items():
            if (calls := context.calls[mixer]) != num_layers:
                raise RuntimeError(
                    f"{mixer} over shared prefixes ran in {calls} of {num_layers} layers of {self.name}: its other "
                    f"layers mix tokens in a way that is not supported; {SHARING_OFF}"
                )


def prepare_config(config: PretrainedConfig, modality: Modality) -> None:
    """Change the config from which a model is built; its encoders keep the attention that was asked for."""
    kept = {encoder: getattr(config, encoder)._attn_implementation for encoder in modality.encoders}
    for name in count_layers(config.get_text_config()):
        MIXERS[name].prepare(config)
    if kept:
        config._attn_implementation = {"": config._attn_implementation, **kept}


def prepare_model(module: Any, modality: Modality, *, compiles: bool, sp_size: int) -> SharedModel:
    """Let the mixers take over, and compile as asked.

    Args:
        module: an unwrapped transformers model, built from a config that went through ``prepare_config``.
        modality: what it reads.
        compiles: compile its decoder layers.
        sp_size: ranks that share the tokens.

    Raises:
        ValueError: the model cannot run over shared prefixes.
    """
    refuse(module, config_issues(module.config) + class_issues(type(module)))
    layers = count_layers(module.config.get_text_config())
    for name in layers:
        if sp_size > 1 and not MIXERS[name].ulysses:
            raise ValueError(
                f"{name} layers of {type(module).__name__} do not mix tokens that are spread over ranks; set "
                f"ulysses_sequence_parallel_size=1, or {SHARING_OFF}"
            )
        MIXERS[name].install(module)
    modality.install(module)
    if compiles:
        compile_layers(module, recomputed=module.is_gradient_checkpointing)
    return SharedModel(type(module).__name__, layers, ModelFlops.of(module))


def kernel_for_compiled_layers(kernel: Kernel) -> Kernel:
    """The kernel as compiled layers want it: gradients of queries, keys and values lie as the forward wrote them."""
    return replace(kernel, heads_first=True)


def refuse(module: nn.Module, issues: list[Issue]) -> None:
    """Raise ValueError with the name of a model's class and what speaks against it, if anything does."""
    if issues:
        causes = "; ".join(f"{issue.why} ({issue.fix})" if issue.fix else issue.why for issue in issues)
        raise ValueError(f"prefixes cannot be shared in {type(module).__name__}: {causes}; {SHARING_OFF}")


def check_no_dropout(module: nn.Module) -> None:
    """Refuse layers that drop out: tokens that samples share would all lose the same numbers.

    Args:
        module: the model with its adapters.

    Raises:
        ValueError: names the layer.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, _DropoutNd) and layer.p > 0:
            raise ValueError(
                f"use_prefix_grouper=True: {name} drops out with p={layer.p}, and samples that share a token would "
                "share its mask; set lora_dropout of the adapter (or the model's dropout) to 0, or "
                f"{SHARING_OFF}"
            )


def load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """A checkpoint's token classifier with one label, with the attention that ``model_config`` names.

    Stands in for ``verl.utils.model.load_valuehead_model``.

    Args:
        local_path: folder of the checkpoint, of the classifier itself or of a causal LM (the head is then new).
        torch_dtype: of the weights.
        model_config: of the checkpoint, ``num_labels`` 1.
        trust_remote_code: the user's own flag.

    Raises:
        ValueError: there is no token classifier for the architecture.
    """
    own_classes = getattr(model_config, "auto_map", None) or {}
    own_class = trust_remote_code and "AutoModelForTokenClassification" in own_classes
    if not own_class and type(model_config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"transformers has no token classifier for {model_config.model_type!r}, so {local_path} cannot be a value "
            "model; set critic.model.path to a checkpoint of an architecture that has one (qwen3, qwen2, llama, ...)"
        )
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
