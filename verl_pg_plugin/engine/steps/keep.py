"""Keep activations of layers through an update: what a budget allows, measured as it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils.device import get_device_name
from verl.workers.config import FSDPEngineConfig, HFModelConfig

from verl_pg_plugin.engine.activation_budget import KEEP_ACTIVATIONS, ActivationBudget, Held
from verl_pg_plugin.engine.batch.layout_field import layout_of, recomputes_attention
from verl_pg_plugin.engine.device_memory import DeviceMemory
from verl_pg_plugin.engine.kept_layers import KeptLayers
from verl_pg_plugin.engine.shared_model import SharedModel
from verl_pg_plugin.engine.sharing_modes import PackedMode, SharingMode
from verl_pg_plugin.engine.steps.meetings import Meetings
from verl_pg_plugin.engine.steps.verify import ForwardStep

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Keeper:
    """Stands between an engine and its ``forward_step``; in updates layers keep what its budget allows.

    Attributes:
        layers: of the model.
        budget: how many a micro-batch keeps.
        mode: of the engine.
    """

    def __init__(self, layers: KeptLayers, budget: ActivationBudget, mode: PackedMode) -> None:
        self.layers, self.budget, self.mode = layers, budget, mode
        self._before: DeviceMemory | None = None
        self._kept: list[tuple[frozenset[int], int]] = []
        self._bytes_per_row: dict[tuple[str, ...], float] = {}

    @classmethod
    def of(
        cls, model: SharedModel, mode: SharingMode, engine_config: FSDPEngineConfig, model_config: HFModelConfig
    ) -> Keeper | None:
        """What an engine needs for ``prefix_grouper.keep_activations``; None where it decides nothing.

        Raises:
            ValueError: layers are to be kept, and the model's are not checkpointed one by one.
        """
        asked = engine_config.prefix_grouper.keep_activations
        if asked == "attention" or engine_config.forward_only or not model_config.enable_gradient_checkpointing:
            return None  # without gradient checkpointing every layer keeps everything
        reason = _why_attention(model, mode, model_config, auto=asked == "auto")
        if reason:
            if asked != "auto":
                raise ValueError(f"{KEEP_ACTIVATIONS}={asked}: {reason}; set ++{KEEP_ACTIVATIONS}=attention")
            if dist.get_rank() == 0:
                logger.warning("%s=auto keeps attention's outputs alone: %s", KEEP_ACTIVATIONS, reason)
            return None
        assert isinstance(mode, PackedMode)
        assert model.kept_layers is not None
        return cls(model.kept_layers, ActivationBudget(asked, model.kept_layers.kinds), mode)

    def start(self, meetings: Meetings) -> None:
        """At the start of an update, on every rank."""
        self._kept, self._bytes_per_row = [], {}
        if self.budget.wants_rise:  # and not that of whatever this process did before: loading weights, a rollout
            DeviceMemory.forget_peak()
        ranks = meetings.gather(DeviceMemory.read)
        self._before = ranks[dist.get_rank()]
        self.budget.begin(ranks)

    def forward_step(
        self, step: ForwardStep, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``step``, with the layers kept for which there is room.

        A micro-batch without planned rows keeps none, nor does one that is short of room itself.
        """
        layout = layout_of(micro_batch)
        if forward_only or layout is None:
            return step(micro_batch, loss_function, forward_only)
        padding = self.mode.num_padding_rows(layout, micro_batch)
        rows = (layout.num_tokens + padding) // self.mode.sp_size
        short = recomputes_attention(micro_batch)
        kept = frozenset[int]() if short else self.budget.layers(rows)
        self._kept.append((kept, rows))
        self.layers.measured.clear()
        kernels_own = not padding and self.mode.sp_group is None
        with self.layers.keeping(kept, self.budget.unmeasured, kernels_own):
            result = step(micro_batch, loss_function, forward_only)
        for place, held in self.layers.measured.items():
            kind = self.layers.kinds[place]
            self._bytes_per_row[kind] = max(held / rows, self._bytes_per_row.get(kind, 0.0))
        return result

    def held(self) -> Held:
        """What this rank saw in the update."""
        return Held(
            kept=tuple(self._kept),
            bytes_per_row=self._bytes_per_row,
            before=self._before,
            after=DeviceMemory.read(),
        )

    def learn(self, ranks: list[Held]) -> dict[str, list[float]]:
        """Take in what every rank saw; returns the update's metrics."""
        self.budget.end(ranks)
        kept = [micro_batch for rank in ranks for micro_batch in rank.kept]
        return {
            "prefix_grouper/kept_layers": [sum(len(layers) for layers, _ in kept) / len(kept)],
            "prefix_grouper/kept_gib": [max(self.budget.held(layers, rows) for layers, rows in kept) / 2**30],
        }

    def run(self, update: Callable[[], T], start_over: Callable[[], None] | None) -> T:
        """``update``; where memory ends while layers are kept, once more with half as many of them.

        Args:
            update: a whole mini-batch, whose losses are then called again.
            start_over: drops its gradients; None where other ranks may be in the middle of a collective, or something
                would be lost.

        Raises:
            torch.OutOfMemoryError: names the override, where layers were kept.
        """
        while True:
            self._kept = []
            try:
                return update()
            except torch.OutOfMemoryError as error:
                most = max((len(layers) for layers, _ in self._kept), default=0)
                if not most:
                    raise
                if start_over is None:
                    raise torch.OutOfMemoryError(
                        f"out of memory while {most} of {self.layers.num_layers} layers kept their activations "
                        f"({KEEP_ACTIVATIONS}={self.budget.asked}); set ++{KEEP_ACTIVATIONS}=attention, or to fewer GiB"
                    ) from error
            # Not inside of the except clause, where the error's frames hold what had filled the memory.
            self.budget.step_down(self._kept)
            start_over()


def _why_attention(model: SharedModel, mode: SharingMode, model_config: HFModelConfig, auto: bool) -> str:
    """Why no layer can be kept, or none that ``auto`` would choose; empty if nothing speaks against it."""
    if not isinstance(mode, PackedMode):
        return "padded groups have not been verified with it"
    if model_config.enable_activation_offload:
        return "activations are offloaded (enable_activation_offload)"
    if model.saved_attention is None:
        return "prefix_grouper.recompute_attention=True keeps nothing"
    if model.kept_layers is None:
        return f"layers of {model.name} are not checkpointed one by one"
    if auto and mode.modality.towers:
        return "the memory that a tower of pictures takes changes from batch to batch"
    if auto and DeviceMemory.read() is None:
        return f"the free memory of a {get_device_name()} device is unknown"
    return ""
