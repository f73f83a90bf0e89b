"""Decoder layers under ``torch.compile``; attention stays outside of the graphs.

In most models the backward does not need the output of a layer's last product, the second matrix of its MLP. So a
checkpoint stops recomputing before it, which saves a quarter of a recomputed layer's FLOPs (Qwen3-4B). A compiled graph
always runs as a whole, so the graphs leave this product out.
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
    # Each kind of layer has a graph with and one without gradient; above its default of 8 torch would stop compiling.
    "recompile_limit": 64,
    "fail_on_recompile_limit_hit": True,
    # Epsilons and scales are constants; as symbols every call would convert and check them.
    "specialize_float": True,
    # So are counts of heads and experts; without these guards torch makes those of FSDP modules symbols, in loops.
    "skip_fsdp_guards": False,
}
AUTOGRAD_SETTINGS: dict[str, Any] = {
    # Gradients of queries, keys and values have the strides of the forward's outputs; torch 2.11 would copy them.
    "guess_tangent_strides_as_outputs": True,
    # Save products and sums, recompute elementwise operators: a layer of Qwen3-4B holds a quarter less.
    # ``aggressive_recomputation`` would also recompute the products of experts.
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}
INDUCTOR_OPTIONS: dict[str, Any] = {
    # Graphs with and without gradient return equal bits: keep every rounding to bf16, autotune no order of sums.
    "emulate_precision_casts": True,
    "deterministic": True,
    # Unroll the sum over a token's experts: a short loop is slow without autotuning.
    "unroll_reductions_threshold": 17,
}
NORMS_AFTER_THE_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm")
"""Gemma 2 and 3, OLMo 2, GLM 4 and others: their backward needs the last product."""

COMPILING_OFF = f"set {COMPILE_LAYERS}=False"
FORWARD_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)
"""Raised by the call of a layer that torch cannot compile."""
BACKWARD_ERRORS = (InductorError, CppCompileError, InvalidCxxCompiler, OperatorIssue, CheckpointError)
"""Raised by a backward, which torch compiles when it first runs, or which recomputes a layer with another graph."""


class LayerCompilerError(RuntimeError):
    """torch cannot compile a decoder layer."""


def compile_layers(module: Any, recomputed: bool = False) -> None:
    """Compile every decoder layer of an unwrapped model in place; torch compiles it when it first runs.

    Layers are compiled one by one, so that FSDP gathers and frees the weights of each and checkpoints recompute it.
    Attention stays outside, since its index maps change with every micro-batch, and so does the last product of
    ``recomputed`` layers. A model without ``_no_split_modules`` is a ValueError.
    """
    layers = decoder_layers(module)
    if not layers:
        raise ValueError(f"{type(module).__name__} names no decoder layers in _no_split_modules. Fix: {COMPILING_OFF}")
    if any(getattr(part, "is_transposed", False) for part in module.modules()):  # experts of gpt-oss
        _keep_strides_of_grouped_products()
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in layers:
        if recomputed and (product := last_product(layer)) is not None:
            product.forward = MethodType(_forward, product)  # one function, so that layers share their graphs
        if CHECKPOINTS_FORWARD and isinstance(layer, GradientCheckpointingLayer):
            # transformers wraps the forward of each subclass in the checkpoint, so the compiled function goes inside.
            # All layers of a class get one subclass, since FSDP1's wrap policy looks classes up by name.
            if (own := type(layer)) not in classes:
                compiled = compile_forward(inspect.unwrap(own.forward))
                classes[own] = type(own.__name__, (own,), {"forward": compiled})
            layer.__class__ = classes[own]
        else:
            layer.forward = compile_forward(layer.forward)


def fix_sizes(layer: nn.Module) -> None:
    """Mark sizes of a layer's weights as static where FSDP1 makes them views; kernels of dynamic sizes are slower."""
    weights = [(part, name) for part in layer.modules() for name, _ in part.named_parameters(recurse=False)]

    def mark(*_: Any) -> None:
        for part, name in weights:
            if type(weight := getattr(part, name)) is torch.Tensor:
                mark_static(weight)

    layer.register_forward_pre_hook(mark)


def let_flat_parameters_compile(module: Any) -> None:
    """Let torch compile the layers of a model that FSDP1 has wrapped; call it before the first forward.

    What: set ``_fsdp_use_orig_params`` of the modules that FSDP manages, which FSDP never reads.
    Why: where it is False dynamo silently runs the module uncompiled. A layer's ``forward`` runs after FSDP's hooks,
    when its parameters are views of flat ones, and these enter the graphs as inputs. ``use_orig_params=True`` itself
    would change the optimizer's state, so that no run could resume in another mode.
    Versions: torch 2.11 to 2.15.
    Remove when: torch compiles flat parameters, or verl has no FSDP1.
    """
    for part in module.modules():
        if getattr(part, MANAGED, False):
            setattr(part, WHOLE, True)


def _keep_strides_of_grouped_products() -> None:
    """Let inductor keep the traced stride order of the inputs of grouped products.

    What: constrain the inputs of ``aten._grouped_mm`` by stride order, not by density.
    Why: experts with transposed weights (gpt-oss) multiply a recomputed, transposed tensor in the backward. In
    inductor's order most token counts fail with "strides should be multiple of 16 bytes".
    Versions: torch 2.11 to 2.14. Only called for such models.
    Remove when: inductor keeps these strides, or ``grouped_mm`` takes any stride.
    """
    from torch._inductor import lowering  # takes seconds to import

    lowering.add_layout_constraint(torch.ops.aten._grouped_mm, lowering.constrain_to_fx_strides)


def compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a layer's ``forward`` for any number of tokens.

    FSDP2 passes a layer views of its inputs in the forward, and the inputs themselves in a recomputation. torch would
    compile a graph for each, and the checkpoint would see other operators. So views are replaced.
    """
    compiled = torch.compile(forward, dynamic=True, options=INDUCTOR_OPTIONS)

    @wraps(forward)
    def call_without_views(*args: Any, **kwargs: Any) -> Any:
        with _settings(), compiling(FORWARD_ERRORS):
            return compiled(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    return call_without_views


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    # With checkpointing the first layer's input requires gradients even in no_grad mode, the others' do not. Detached
    # they share a graph.
    return _SameStorage.apply(value) if torch.is_grad_enabled() else value.detach()


class _SameStorage(torch.autograd.Function):
    """The identity; its output is no view of the input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@contextmanager
def _settings() -> Iterator[None]:
    """Set torch's options for one call of a layer: compiled losses keep theirs, and a GPU's backward has its thread."""
    settings = ((config, DYNAMO_SETTINGS), (functorch_config, AUTOGRAD_SETTINGS))
    undo = [theirs._make_closure_patcher(**ours)() for theirs, ours in settings]  # 3x faster than ``config.patch``
    # If several graphs fit a call, the forward and its recomputation must run the same one. By default torch tries the
    # most recent one first (https://github.com/pytorch/pytorch/issues/166926).
    torch._C._dynamo.eval_frame._set_lru_cache(False)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame._set_lru_cache(True)
        for restore in undo:
            restore()


@contextmanager
def compiling(failures: tuple[type[Exception], ...] = BACKWARD_ERRORS) -> Iterator[None]:
    """Raise LayerCompilerError, which names the option to set, if torch raises one of ``failures`` in this block."""
    try:
        yield
    except failures as error:
        root = getattr(error, "inner_exception", error)
        problem, fix = "torch failed with decoder layers compiled", COMPILING_OFF
        if isinstance(error, FailOnRecompileLimitHit):
            root, graphs = error.__cause__ or error, DYNAMO_SETTINGS["recompile_limit"]
            problem = f"torch.compile has made {graphs} graphs of one function of a decoder layer, the limit"
        elif isinstance(error, CheckpointError):  # also raised without compiling if the inputs of a layer differ
            fix += ", or enable_gradient_checkpointing=False"
        cause = f"{type(root).__name__}: {str(root).strip()}".splitlines()[0]
        raise LayerCompilerError(f"{problem}: {cause}. Fix: {fix}") from error


def decoder_layers(module: Any) -> list[nn.Module]:
    """Return the layers of a transformers model in module order; empty without ``_no_split_modules``."""
    names = set(module._no_split_modules or ())
    if not names:
        return []
    text = module if module.config.get_text_config() is module.config else module.get_decoder()  # without encoders
    return [layer for layer in text.modules() if type(layer).__name__ in names]


def last_product(layer: nn.Module) -> nn.Module | None:
    """Return the second matrix of a layer's MLP, by transformers' name for it; None if a norm reads its output."""
    if any(hasattr(layer, norm) for norm in NORMS_AFTER_THE_MLP):
        return None
    product = getattr(getattr(layer, "mlp", None), "down_proj", None)
    return product if type(product) is nn.Linear else None


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Multiply outside of the graphs, unless the matrix is frozen: then LoRA's products follow."""
    if torch.is_grad_enabled() and self.weight.requires_grad:
        return _uncompiled(input, self.weight, self.bias)
    return F.linear(input, self.weight, self.bias)


_uncompiled = torch.compiler.disable(F.linear, reason="a checkpoint stops before it")
