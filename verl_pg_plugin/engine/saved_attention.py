"""Gradient checkpointing that keeps what attention computed and recomputes the rest of a layer.

Attention is the one part of a layer whose cost grows with the length of the sequences, and its output is small: H x D
numbers per row, one to two times the hidden size. So keeping it saves the larger share of the recomputation for little
memory (selective activation checkpointing, ``torch.utils.checkpoint.create_selective_checkpoint_contexts``).

torch would have every operator of a layer looked at, on its way to the device and again in the backward: as much of the
host's time as all the rest of a small layer, compiled or not. Here attention alone is.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from verl_pg_plugin.attention.kernels.specs import KERNELS


class SavedAttention:
    """What the checkpointed layers of one model keep for their backward: the results of their attention kernel.

    Attributes:
        mode: torch's, of the checkpoint around the layer that runs now; None outside of any.

    Raises:
        RuntimeError: the kernel's package has renamed its operator, so nothing would be kept.
    """

    def __init__(self, kernel_name: str) -> None:
        self._operators = KERNELS[kernel_name].saved_ops
        self._keeps = True
        self.mode: AbstractContextManager | None = None
        if not any(map(_exists, self._operators)):
            names = " or ".join(self._operators)
            raise RuntimeError(
                f"attention kernel {kernel_name} has no operator {names} in this version, so its outputs cannot be "
                "kept; set prefix_grouper.recompute_attention=True"
            )

    def install(self, module: Any) -> None:
        """Checkpoint the layers of a transformers model but for their attention kernel."""
        kwargs = {"use_reentrant": False, "context_fn": self.contexts}
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Forwards in the block keep no more than their layers' inputs; their backward runs attention again."""
        self._keeps = False
        try:
            yield
        finally:
            self._keeps = True

    def contexts(self) -> Any:
        """The ``context_fn`` of a checkpoint: what its forward keeps, and its backward takes."""
        # A layer's backward follows what its forward was asked to keep, whatever is asked for by then.
        modes = create_selective_checkpoint_contexts(partial(_policy, self._operators if self._keeps else ()))
        return tuple(_ForAttention(self, mode) for mode in modes)

    def attention(self, attend: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """``attend``, its kernel's results kept, or taken, as the checkpoint around says; see ``SharedRows.around``."""
        with self.mode or nullcontext():
            return attend(*tensors)


class _ForAttention(AbstractContextManager):
    """What a checkpoint enters around a layer; ``mode`` is left to the layer's attention."""

    def __init__(self, saved: SavedAttention, mode: AbstractContextManager) -> None:
        self._saved, self._mode = saved, mode
        self._outer: AbstractContextManager | None = None

    def __enter__(self) -> None:
        self._outer, self._saved.mode = self._saved.mode, self._mode

    def __exit__(self, *_: object) -> None:
        self._saved.mode = self._outer


def _exists(operator: str) -> bool:
    namespace, _, name = operator.partition("::")
    return hasattr(getattr(torch.ops, namespace), name)


def _policy(saved: tuple[str, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in saved else CheckpointPolicy.PREFER_RECOMPUTE
