"""Check that log-probs can be computed from a model's LM head instead of its logits."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from verl_pg_plugin.issue import Issue


def lm_head_issues(model_class: type[PreTrainedModel]) -> list[Issue]:
    """Return an issue if a causal language model class cannot run its head on selected tokens."""
    if "logits_to_keep" in inspect.signature(model_class.forward).parameters:
        return []
    return [Issue("", f"{model_class.__name__} cannot run its LM head on response tokens only (logits_to_keep)")]


def head_obstacle(module: Any) -> str:
    """Return why the logits of an unwrapped causal language model may differ from its head's output, or ''.

    The model's ``forward`` runs with a stub decoder and a stub head. It must return the head's tensor unchanged.
    """
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__module__}.{type(head).__qualname__}"
    tokens = torch.arange(2, device=module.device)
    hidden = torch.zeros(1, len(tokens), head.in_features, device=module.device, dtype=module.dtype)
    wide = torch.promote_types(module.dtype, torch.float32)  # some models cast logits to it
    logits = torch.ones(1, len(tokens), head.out_features, dtype=wide)
    name = type(module).__name__
    try:
        with torch.no_grad(), ExitStack() as stack:
            stack.enter_context(_returning(head, logits))
            for decoder in {module.base_model, module.get_decoder()}:  # most call the first, OPT the second
                stack.enter_context(_returning(decoder, _DecoderOutput(last_hidden_state=hidden)))
            output = module(input_ids=tokens[None], logits_to_keep=tokens, use_cache=False).logits
    except Exception as error:  # a custom forward may raise anything
        return f"{name} does not run with a stub decoder ({type(error).__name__}: {str(error).splitlines()[0]})"
    if output is not logits or not bool((logits == 1).all()):
        return f"{name} changes the output of its head (scaled or capped logits)"
    return ""


def fused_obstacle(module: Any) -> str:
    """Return why verl's fused kernels cannot replace the head of ``module``, or '' if they can."""
    obstacle = head_obstacle(module)
    if not obstacle and module.get_output_embeddings().bias is not None:
        return "the head has a bias, which the fused kernels ignore"
    return obstacle


class _DecoderOutput(MoeModelOutputWithPast):
    """Hidden states only; all other attributes are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _returning(module: nn.Module, output: Any) -> Iterator[None]:
    """Replace the forward of ``module`` by one that returns ``output``."""
    own = module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
