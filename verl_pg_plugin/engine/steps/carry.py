"""Run the parts of chains as planned and hand rows from one to the next, see ``attention.carried_rows``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from verl_pg_plugin.attention.carried_rows import Carrying
from verl_pg_plugin.attention.carry_stack import CarryBlock, CarryStack
from verl_pg_plugin.engine.batch.layout_field import export_of, layout_of, recomputes_attention, set_layout
from verl_pg_plugin.engine.batch.row_selection import RowSelector
from verl_pg_plugin.engine.saved_attention import SavedAttention
from verl_pg_plugin.engine.steps.verify import ForwardStep
from verl_pg_plugin.layout import Layout, PackedLayout


class Carrier:
    """Stands between an engine and its ``forward_step`` for one mini-batch.

    Attributes:
        module: the engine's, whose training mode an export leaves for a moment.
        saved_attention: what layers keep for their backward; a micro-batch short of room does without.
        eager_exports: exports do not run compiled; where every micro-batch has one shape, each would compile its own.
        stack: rows that later micro-batches read.
    """

    def __init__(
        self, module: nn.Module, saved_attention: SavedAttention | None = None, eager_exports: bool = False
    ) -> None:
        self.module = module
        self.saved_attention = saved_attention
        self.eager_exports = eager_exports
        self.stack = CarryStack()
        self._carrying: Carrying | None = None

    def check_all_claimed(self) -> None:
        """To be asked at the end of the mini-batch.

        Raises:
            RuntimeError: rows were handed on that no part has taken.
        """
        if self.stack.num_rows:
            raise RuntimeError(f"{self.stack.num_rows} carried rows were never claimed by the part that owns them")

    def carrying(self, layout: Layout) -> Carrying | None:
        """What the forward in hand carries; None if ``layout`` stands alone.

        Raises:
            RuntimeError: it is part of a chain and not the forward in hand: its keys are nowhere.
        """
        if not layout.is_chunk:
            return None
        if self._carrying is None or self._carrying.layout is not layout:
            raise RuntimeError("a part of a chain runs outside its mini-batch: the rows it carries are gone")
        return self._carrying

    def forward_step(
        self,
        export_step: ForwardStep,
        step: ForwardStep,
        micro_batch: TensorDict,
        loss_function: Callable | None,
        forward_only: bool,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``step``, with an export before it where the plan asks for one.

        Args:
            export_step: computes rows that no sequence reads, so nothing must verify or count them.
            step: computes the micro-batch.
        """
        layout = layout_of(micro_batch)
        owed: list[CarryBlock] = []
        if layout.is_chunk and not forward_only and len(layout.publish):
            owed = self.stack.pop(layout.publish_start)
            for block in owed:
                block.key_values.clear()  # their owner computes them again
        if export := export_of(micro_batch):
            self._export(export_step, micro_batch, export)
        if not layout.is_chunk:
            return step(micro_batch, loss_function, forward_only)

        leave = _empty_block(layout) if forward_only else None
        self._carrying = Carrying(layout, read=list(self.stack), leave=leave, owed=owed)
        saved = self.saved_attention if recomputes_attention(micro_batch) else None
        with nullcontext() if saved is None else saved.dropped():
            result = step(micro_batch, loss_function, forward_only)
        self._carrying = None
        if leave is not None:
            self.stack.pop(layout.publish_start)
            if len(layout.publish):
                self.stack.push(leave)
        return result

    def _export(self, step: ForwardStep, micro_batch: TensorDict, layout: PackedLayout) -> None:
        samples = RowSelector(micro_batch).select([0])  # a chain's first sequence stands first
        set_layout(samples, layout)
        block = _empty_block(layout)
        # One that only keeps other ranks company reads nothing, whatever lies on the stack.
        read = list(self.stack) if layout.num_cached else []
        self._carrying = Carrying(layout, read=read, leave=block, is_export=True)
        compiled = torch.compiler.set_stance("force_eager") if self.eager_exports else nullcontext()
        with torch.no_grad(), _evaluating(self.module), compiled:
            step(samples, None, True)
        self._carrying = None
        if len(layout.publish):
            self.stack.push(block)


def _empty_block(layout: PackedLayout) -> CarryBlock:
    return CarryBlock(layout.publish_start, layout.publish_start + len(layout.publish))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """verl's activation offload counts forwards in training mode; what else differs there, dropout, is refused."""
    training = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, flag in training:
            part.training = flag
