"""Gradient checkpointing that keeps what attention computed and recomputes the rest of a layer.

Attention is the one part of a layer whose cost grows with the length of the sequences, and its output is small: H x D
numbers per row, one to two times the hidden size. So keeping it saves the larger share of the recomputation for little
memory (selective activation checkpointing, ``torch.utils.checkpoint.create_selective_checkpoint_contexts``).

torch would have Python look at every operator of a layer, on its way to the device and again when it is recomputed, and
small models wait for the host as it is. In decoder layers it looks at the kernel alone; blocks of a tower, whose
attention does not come by here, are looked at whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from verl_pg_plugin.attention.kernels.specs import KERNELS
from verl_pg_plugin.engine.compiled_layers import decoder_layers


class SavedAttention:
    """What the checkpointed layers of one model keep for their backward: the results of their attention kernel.

    Attributes:
        running: the checkpoint around the decoder layer that runs now; None outside of any.

    Raises:
        RuntimeError: the kernel's package has renamed its operator, so nothing would be kept.
    """

    def __init__(self, kernel_name: str) -> None:
        self._operators = KERNELS[kernel_name].saved_ops
        self._keeps = True
        self.running: _Pass | None = None
        if not any(map(_exists, self._operators)):
            names = " or ".join(self._operators)
            raise RuntimeError(
                f"attention kernel {kernel_name} has no operator {names} in this version, so its outputs cannot be "
                "kept; set ++prefix_grouper.recompute_attention=True"
            )

    def install(self, module: Any) -> None:
        """Checkpoint the layers of a transformers model but for their attention kernel."""
        kwargs = {"use_reentrant": False, "context_fn": self._modes}
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        for layer in decoder_layers(module):
            if getattr(layer, "_gradient_checkpointing_func", None) is not None:
                layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=self.contexts)

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Forwards in the block keep no more than their layers' inputs; their backward runs attention again."""
        self._keeps = False
        try:
            yield
        finally:
            self._keeps = True

    def contexts(self) -> tuple[_Pass, _Pass]:
        """The ``context_fn`` of a checkpoint: what attention in its forward keeps, and in its backward takes."""
        taking: list[AbstractContextManager] = []
        # A layer's backward follows what its forward was asked to keep, whatever is asked for by then.
        modes = partial(create_selective_checkpoint_contexts, self._policy(self._operators))

        def keeping(call: int) -> AbstractContextManager:
            keeps, takes = modes()
            taking.append(takes)
            return keeps

        return _Pass(self, keeping), _Pass(self, taking.__getitem__)

    def _modes(self) -> Any:
        """Of a tower's layers, which call a kernel's package as transformers does, and not always the same one."""
        operators = tuple(operator for spec in KERNELS.values() for operator in spec.saved_ops)
        return create_selective_checkpoint_contexts(self._policy(operators))

    def _policy(self, operators: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
        return partial(_policy, operators if self._keeps else ())

    def kernel(self, attend: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """``attend``, its results kept, or taken, as the checkpoint around says; see ``VarlenKernel.around``."""
        if self.running is None:
            return attend(*args, **kwargs)
        with self.running.next_mode():
            return attend(*args, **kwargs)


class _Pass(AbstractContextManager):
    """A layer's forward or its recomputation: torch's mode for each call of the kernel in it, in their order.

    torch's modes count operators from where they are entered, so calls do not share one.
    """

    def __init__(self, saved: SavedAttention, mode_of: Callable[[int], AbstractContextManager]) -> None:
        self._saved, self._mode_of, self._calls = saved, mode_of, 0

    def __enter__(self) -> None:
        self._calls, self._saved.running = 0, self

    def __exit__(self, *_: object) -> None:
        # torch 2.11 leaves a layer that has failed no sooner than the exception is forgotten, when another may run.
        if self._saved.running is self:
            self._saved.running = None

    def next_mode(self) -> AbstractContextManager:
        self._calls += 1
        return self._mode_of(self._calls - 1)


def _exists(operator: str) -> bool:
    namespace, _, name = operator.partition("::")
    return hasattr(getattr(torch.ops, namespace), name)


def _policy(saved: tuple[str, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in saved else CheckpointPolicy.PREFER_RECOMPUTE
