"""Does a causal language model return what its head put out, or does it scale or cap that first?

Found by running the model's own ``forward`` around a trunk and a head that only pretend: what comes out as logits must
be the very tensor that the head returned, unchanged. That costs nothing, needs no weights, and holds for any class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

__all__ = ["fused_obstacle", "head_obstacle"]


def head_obstacle(module: Any) -> str:
    """Why the output of ``module`` may differ from that of its head; empty where it is the same.

    Args:
        module: an unwrapped causal LM of transformers, on any device, after adapters were put into it.
    """
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__module__}.{type(head).__qualname__}"
    rows = torch.arange(2, device=module.device)
    hidden = torch.zeros(1, len(rows), head.in_features, device=module.device, dtype=module.dtype)
    logits = torch.ones(1, len(rows), head.out_features)
    pretended = _TrunkOutput(last_hidden_state=hidden)
    name = type(module).__name__
    try:
        with torch.no_grad(), ExitStack() as stack:
            stack.enter_context(_pretending(head, logits))
            for trunk in {module.base_model, module.get_decoder()}:  # most call the first, OPT the second
                stack.enter_context(_pretending(trunk, pretended))
            found = module(input_ids=rows[None], logits_to_keep=rows, use_cache=False).logits
    except Exception as error:  # a forward of any kind: that it cannot be looked at is the answer
        return f"{name} does not run around another trunk ({type(error).__name__}: {str(error).splitlines()[0]})"
    if found is not logits or not bool((logits == 1).all()):
        return f"{name} changes what its head puts out (scaled or capped logits)"
    return ""


def fused_obstacle(module: Any) -> str:
    """Why the head of ``module`` cannot run as verl's fused kernels, which multiply by its weight; empty if it can."""
    obstacle = head_obstacle(module)
    if not obstacle and module.get_output_embeddings().bias is not None:
        return "the head has a bias, which the fused kernels leave out"
    return obstacle


class _TrunkOutput(MoeModelOutputWithPast):
    """Hidden states alone; all else that a forward may read is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _pretending(module: nn.Module, output: Any) -> Iterator[None]:
    """``module`` returns ``output``, whatever it is given."""
    own: Callable[..., Any] | None = module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
