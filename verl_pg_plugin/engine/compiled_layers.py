"""Decoder layers under ``torch.compile``: everything between the attention calls, fused by the compiler.

In most models nothing in a layer reads what the second matrix of its MLP returns. A checkpoint stops recomputing once
it has what the backward needs, and so would stop in front of that product, a quarter of the FLOPs of a recomputed layer
of Qwen3-4B. But a compiled graph runs as a whole. So a layer's graphs leave its last product out.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config, mark_static
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler, OperatorIssue
from torch.utils.checkpoint import CheckpointError
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_pg_plugin.config.compile import COMPILE_LAYERS, MANAGED, WHOLE
from verl_pg_plugin.gradient_checkpointing import CHECKPOINTS_FORWARD

DYNAMO_SETTINGS: dict[str, Any] = {
    # Graphs that one function may be compiled to: kinds of layers count, and with and without gradient. Behind its own
    # limit of 8 torch would run the rest uncompiled.
    "recompile_limit": 64,
    "fail_on_recompile_limit_hit": True,
    # Numbers of a layer (epsilons, scales) never change. As symbols each would be made a tensor, checked and read again
    # in every call of a graph.
    "specialize_float": True,
    # Nor do its counts (heads, experts of a token). torch takes those of modules under FSDP for symbols, and loops.
    "skip_fsdp_guards": False,
}
AUTOGRAD_SETTINGS: dict[str, Any] = {
    # Gradients of queries, keys and values lie as the forward has written these. 2.11 would copy them by default.
    "guess_tangent_strides_as_outputs": True,
    # Products and sums are saved, and the backward computes what is elementwise: a layer of Qwen3-4B holds a quarter
    # less. ``aggressive_recomputation`` would compute the products of experts again.
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}
INDUCTOR_OPTIONS: dict[str, Any] = {
    # Bits are the same without gradient: no rounding to bf16 is left out, and no kernel's order of sums is timed.
    "emulate_precision_casts": True,
    "deterministic": True,
    # A sum over a token's experts is written out: a loop over so few is slow, the slower with its block not timed.
    "unroll_reductions_threshold": 17,
}
NORMS_BEHIND_THE_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm")
"""Of Gemma 2 and 3, OLMo 2, GLM 4 and their kin, whose backward wants the product."""

COMPILING_OFF = f"set {COMPILE_LAYERS}=False"
OF_A_CALL = (TorchDynamoException, FailOnRecompileLimitHit)
"""What torch raises out of the call of a layer that it cannot compile."""
OF_A_BACKWARD = (InductorError, CppCompileError, InvalidCxxCompiler, OperatorIssue, CheckpointError)
"""What it raises out of a backward: that is compiled when it first runs, and may recompute a layer by another graph."""


class LayerCompilerError(RuntimeError):
    """torch could not compile a decoder layer, or would not go on compiling it."""


def compile_layers(module: Any, recomputed: bool = False) -> None:
    """Compile every decoder layer of an unwrapped model in place, when it first runs.

    One by one, so that FSDP can gather and free each one's weights and gradient checkpointing can recompute it.
    Attention stays outside (``attention.interface``), since its index maps differ in every micro-batch, and the last
    product of layers that are ``recomputed``. A model that does not say which modules are layers is a ValueError.
    """
    layers = decoder_layers(module)
    if not layers:
        raise ValueError(f"{type(module).__name__} names no decoder layers in _no_split_modules; {COMPILING_OFF}")
    if any(getattr(part, "is_transposed", False) for part in module.modules()):  # experts of gpt-oss
        _keep_strides_of_grouped_products()
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in layers:
        if recomputed and (product := last_product(layer)) is not None:
            product.forward = MethodType(_forward, product)  # one function for all layers, which so share their graphs
        if CHECKPOINTS_FORWARD and isinstance(layer, GradientCheckpointingLayer):
            # Each subclass is wrapped in the checkpoint: what is inside is compiled, so a recomputation runs its graph.
            # One for all layers of a class: FSDP1's wrap policy takes the first of a name, and its instances.
            if (own := type(layer)) not in classes:
                compiled = compile_forward(inspect.unwrap(own.forward))
                classes[own] = type(own.__name__, (own,), {"forward": compiled})
            layer.__class__ = classes[own]
        else:
            layer.forward = compile_forward(layer.forward)


def fix_sizes(layer: nn.Module) -> None:
    """Let torch take sizes of weights as fixed where FSDP1 will make them views: kernels for any size are slower."""
    weights = [(part, name) for part in layer.modules() for name, _ in part.named_parameters(recurse=False)]

    def mark(*_: Any) -> None:
        for part, name in weights:
            if type(weight := getattr(part, name)) is torch.Tensor:
                mark_static(weight)

    layer.register_forward_pre_hook(mark)


def let_flat_parameters_compile(module: Any) -> None:
    """Let torch compile the layers of a model that FSDP1 has wrapped, before its first forward.

    What: ``_fsdp_use_orig_params`` of the modules that FSDP manages (``_is_fsdp_managed_module``) becomes True. FSDP
    writes it and never reads it.
    Why: dynamo runs a managed module uncompiled where it is False, and says nothing. A layer's ``forward`` is called
    behind FSDP's hooks, when its parameters are views of flat ones; these go into its graphs as inputs, as whole ones
    do. ``use_orig_params=True`` itself would change the optimizer's state: no run could be resumed in another mode.
    Versions: torch 2.11 to 2.15.
    Remove when: torch compiles flat parameters, or verl has no FSDP1.
    """
    for part in module.modules():
        if getattr(part, MANAGED, False):
            setattr(part, WHOLE, True)


def _keep_strides_of_grouped_products() -> None:
    """Let torch write what a compiled graph hands to a grouped product in the order that it was traced in.

    What: inductor's constraint on the inputs of ``aten._grouped_mm`` is the order of their strides, no longer density.
    Why: the backward of experts whose weights lie as they are multiplied (gpt-oss) multiplies what it recomputes,
    transposed. Written in that order, its rows are as long as tokens have experts in all, and most such numbers end in
    "strides should be multiple of 16 bytes".
    Versions: torch 2.11 to 2.14. Only called for such models.
    Remove when: inductor keeps these strides, or ``grouped_mm`` takes rows of any length.
    """
    from torch._inductor import lowering  # seconds, which other models are spared

    lowering.add_layout_constraint(torch.ops.aten._grouped_mm, lowering.constrain_to_fx_strides)


def compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's ``forward``, compiled for any number of tokens.

    FSDP2 hands a layer views of its inputs, and in a recomputation the inputs themselves. torch would compile a graph
    for each, and the checkpoint find operators that the forward never ran. So no view is handed on.
    """
    compiled = torch.compile(forward, dynamic=True, options=INDUCTOR_OPTIONS)

    @wraps(forward)
    def of_plain_inputs(*args: Any, **kwargs: Any) -> Any:
        with _settings(), compiling(OF_A_CALL):
            return compiled(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    return of_plain_inputs


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    # With checkpointing transformers makes the first layer's input require gradients without gradient mode too, and no
    # other's. Detached they share a graph.
    return _SameStorage.apply(value) if torch.is_grad_enabled() else value.detach()


class _SameStorage(torch.autograd.Function):
    """The identity, whose result is no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@contextmanager
def _settings() -> Iterator[None]:
    """Around each call of a layer: losses may be compiled too, and a GPU's backward has a thread of its own."""
    settings = ((config, DYNAMO_SETTINGS), (functorch_config, AUTOGRAD_SETTINGS))
    # A third of the time of ``config.patch``.
    undo = [torchs._make_closure_patcher(**ours)() for torchs, ours in settings]
    # Where several graphs fit a call, the forward and its recomputation in the backward must take the same one: by
    # default torch tries the one first that ran last (https://github.com/pytorch/pytorch/issues/166926).
    torch._C._dynamo.eval_frame._set_lru_cache(False)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame._set_lru_cache(True)
        for back in undo:
            back()


@contextmanager
def compiling(failures: tuple[type[Exception], ...] = OF_A_BACKWARD) -> Iterator[None]:
    """Around compiled layers and their backwards: what torch cannot compile is an error that names the option.

    ``failures`` are what torch may raise. LayerCompilerError from torch's own; nothing falls back to slower layers.
    """
    try:
        yield
    except failures as error:
        root = getattr(error, "inner_exception", error)
        what, way = "torch failed with decoder layers compiled", COMPILING_OFF
        if isinstance(error, FailOnRecompileLimitHit):
            root, graphs = error.__cause__ or error, DYNAMO_SETTINGS["recompile_limit"]
            what = f"torch.compile has made {graphs} graphs of one function of a decoder layer and would stop compiling"
        elif isinstance(error, CheckpointError):  # if a layer's inputs differ, compiled or not
            way += ", or enable_gradient_checkpointing=False"
        cause = f"{type(root).__name__}: {str(root).strip()}".splitlines()[0]
        raise LayerCompilerError(f"{what}: {cause}; {way}") from error


def decoder_layers(module: Any) -> list[nn.Module]:
    """Layers of a transformers model, in the order of its modules; empty where it does not say which they are."""
    names = set(module._no_split_modules or ())
    if not names:
        return []
    text = module if module.config.get_text_config() is module.config else module.get_decoder()  # without encoders
    return [layer for layer in text.modules() if type(layer).__name__ in names]


def last_product(layer: nn.Module) -> nn.Module | None:
    """The second matrix of a layer's MLP, by its name in transformers' models; None where a norm reads the product."""
    if any(hasattr(layer, norm) for norm in NORMS_BEHIND_THE_MLP):
        return None
    product = getattr(getattr(layer, "mlp", None), "down_proj", None)
    return product if type(product) is nn.Linear else None


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Between graphs. A frozen matrix stays inside, as under LoRA, whose own products come behind it."""
    if torch.is_grad_enabled() and self.weight.requires_grad:
        return _uncompiled(input, self.weight, self.bias)
    return F.linear(input, self.weight, self.bias)


_uncompiled = torch.compiler.disable(F.linear, reason="a checkpoint stops in front of it")
