"""Activation checkpoints of decoder layers, at a level for each micro-batch, and the memory that is free for them.

Gradient checkpointing keeps a layer's inputs and, in the levels of attention, what the attention kernel computed; the
rest runs once more in the backward. Levels ``on_host`` copy what is kept to pinned memory after the layer and bring it
back during the backward of the next layer, so that at most two layers are on the device. Each record refers to the one
before it weakly: a graph that dies takes its copies along.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from verl_pg_plugin.attention.context import ForwardContext
from verl_pg_plugin.planning.activation_level import DEVICE_RESERVE, Level, MemoryBudget

SMALLEST = 1 << 20
"""Bytes below which a tensor stays on the device: its copy would cost more than it frees."""
SLAB = 64 << 20
"""Bytes of a block of pinned memory: torch rounds blocks up to powers of two, and pins anew what fits none it has."""
HOST_RESERVE = 0.2
"""Of a host's memory, left free: what other processes of the run will still ask for."""
VERSION1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
"""Of control groups: their root, files of what they may hold and do hold, and what of that can be dropped."""


def checkpoint_layer(call: partial[Any], *args: Any) -> Any:
    """Run a decoder layer under the checkpoint of its context; stands in for ``_gradient_checkpointing_func``.

    transformers passes the layer as a partial that holds all its keywords, the context among them.
    """
    context: ForwardContext | None = call.keywords.get("prefix_grouper")
    if context is None or context.checkpoint is None or not torch.is_grad_enabled():
        return call(*args)
    return context.checkpoint(context, call, *args)


class LayerCheckpoints:
    """The activation checkpoints of one micro-batch; no ``copier`` on a CPU, whose memory is the host's."""

    def __init__(self, level: Level, copier: PinnedCopier | None) -> None:
        self.level, self._copier = level, copier if level.on_host else None
        self._last: Callable[[], CheckpointRecord | None] = lambda: None

    def run(self, context: ForwardContext, call: partial[Any], *args: Any) -> Any:
        """Run a layer with a record of its own, which its backward reads again."""
        record, before = CheckpointRecord(self._copier, self._last), self._last()
        self._last = weakref.ref(record)
        if self.level.keeps_attention:
            call = partial(call, prefix_grouper=context.with_record(record))

        def layer(*args: Any) -> Any:  # once in the forward, then in each recomputation
            record.start()
            return call(*args)

        # A hook around a checkpoint sees its inputs, which torch saves for autograd, and nothing from inside.
        hooks = saved_tensors_hooks(record.put, record.get) if self.level.on_host else nullcontext()
        with hooks:
            out = checkpoint(layer, *args, use_reentrant=False)
        if before is not None:
            before.leave_device()
        return out


class _Copy:
    """A tensor on the host, and on the device (``x``) until it has left and from when it is on its way back."""

    def __init__(self, x: Tensor, like: Tensor, copier: PinnedCopier) -> None:
        self.x: Tensor | None = None  # until the host has a place for it
        self.like, self.copier = like, copier
        self.host, self.event = copier.out(x)
        self.x = x

    def fetch(self) -> None:
        if self.x is None:
            self.x, self.event = self.copier.back(self.host, self.like)

    def leave_device(self) -> None:
        """Free the memory, behind the copy."""
        self.event.wait()
        self.x = None

    def __del__(self) -> None:
        if self.x is not None:  # the graph dies half way, as in an error: the copy may still write
            self.leave_device()


class CheckpointRecord:
    """Tensors that one call of a checkpointed layer keeps; autograd's graph holds the record.

    Attention's outputs are kept and the rest is recomputed: attention is the one part of a layer whose cost grows with
    the length of the sequences, and its output is small. One graph may have several recomputations.
    """

    def __init__(self, copier: PinnedCopier | None, before: Callable[[], CheckpointRecord | None]) -> None:
        self._copier, self._before = copier, before
        self._copies: list[_Copy] = []
        self._kept: list[list[Any]] = []  # (out, lse) of each attention call, in their order
        self._runs = 0

    def start(self) -> None:
        """Begin the forward, or a recomputation, which reads what the forward has kept from the first call on."""
        self._runs += 1
        self._replay = iter(self._kept)

    def computed(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return what ``compute`` returns; in a recomputation what the forward kept of this call, or RuntimeError."""
        if self._runs == 1:
            out, lse = compute()
            self._kept.append([self.put(out), self.put(lse)])
            return out, lse
        kept = next(self._replay, None)
        if kept is None:
            raise RuntimeError(
                "a layer calls attention more often when it is recomputed; set ++prefix_grouper.activations=all"
            )
        return self.get(kept[0]), self.get(kept[1])

    def put(self, x: Tensor) -> Any:
        x = x.detach()  # what requires grad would hold the graph that holds this call: a cycle that no collector sees
        if self._copier is None or x.nbytes < SMALLEST:
            return x
        like = torch.empty_like(x, device="meta")
        if like.stride() != x.stride():  # it has gaps, and stays on the device
            return x
        self._copies.append(_Copy(x, like, self._copier))
        return self._copies[-1]

    def get(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept.detach()
        kept.fetch()  # where the layer behind has not
        before = self._before()
        for copy in before._copies if before else ():
            copy.fetch()
        kept.event.wait()  # what is launched from here on finds the copy done
        x, kept.x = kept.x, None
        return x

    def leave_device(self) -> None:
        for copy in self._copies:
            copy.leave_device()


class PinnedCopier:
    """Copies between a GPU and pinned memory on a stream of their own, each behind whatever has been launched.

    Memory of the device belongs to the stream that computes and is freed once that has waited for the copy. No block
    changes streams, so none needs ``record_stream``, which would keep it until the host next looks.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0

    def out(self, x: Tensor) -> tuple[list[Tensor], torch.cuda.Event]:
        """Start a copy to the host."""
        host = list(self._pieces(x.nbytes))
        return host, self._copy(zip(host, _parts(x, host), strict=True))

    def back(self, host: list[Tensor], like: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start a copy to a new tensor with the sizes and strides of ``like``."""
        x = torch.empty_like(like, device=self._stream.device)
        return x, self._copy(zip(_parts(x, host), host, strict=True))

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        # Behind what writes the source, and what still runs in memory that the target has taken over.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _pieces(self, nbytes: int) -> Iterator[Tensor]:
        """Pinned memory of so many bytes, out of slabs that neighbours share."""
        while nbytes:
            if self._used == len(self._slab):
                self._slab, self._used = torch.empty(SLAB, dtype=torch.uint8, pin_memory=True), 0
            piece = self._slab[self._used : self._used + nbytes]
            self._used, nbytes = self._used + len(piece), nbytes - len(piece)
            yield piece


def _parts(x: Tensor, host: list[Tensor]) -> tuple[Tensor, ...]:
    """The bytes of a tensor without gaps as they lie, in parts as long as ``host``."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).split(list(map(len, host)))


def memory_budget_of_rank(module: Any, beside: float, head: float, host: float) -> MemoryBudget:
    """Bytes for the activations of an update that is about to run; negative where the device is already too full.

    Gradients that ``module`` does not have yet are counted, and what the update takes ``beside`` tokens, as gathered
    weights. Part of the LM head's bytes is needed while layers hold less than at the peak.
    """
    free, total = torch.cuda.mem_get_info()
    allocated, limit = torch.cuda.memory_allocated(), torch.cuda.get_per_process_memory_fraction() * total
    usable = min(free + torch.cuda.memory_reserved() - allocated, limit - allocated)
    weights = [getattr(p, "_local_tensor", p) for p in module.parameters() if p.requires_grad and p.grad is None]
    gradients = sum(weight.nbytes for weight in weights if weight.device.type == "cuda")
    reserve = DEVICE_RESERVE * limit
    return MemoryBudget(usable - gradients - beside - head - reserve, host, reserve + head)


def host_bytes(root: Path = Path("/")) -> float:
    """Memory that a rank may pin: what the machine or its container has, shared over the ranks of the node."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    machine = {fields[0]: 1024 * int(fields[1]) for fields in lines if len(fields) == 3}
    free = machine["MemAvailable:"] - HOST_RESERVE * machine["MemTotal:"]
    for limit, used in _limits(root):
        free = min(free, limit * (1 - HOST_RESERVE) - used)
    # verl's workers set LOCAL_WORLD_SIZE to 1 where it was not set, whatever Ray has started.
    ranks = os.environ.get("RAY_LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1
    return max(free, 0.0) / int(ranks)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Bytes that control groups of this process may hold and do hold, without files that can be dropped."""
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, limit, used, files = VERSION1 if controllers else VERSION2
        top = root / mounted
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):  # a container may not show the path but its end
            if (group / limit).is_file() and (most := (group / limit).read_text().strip()) != "max":
                droppable = group / "memory.stat"  # which not every control group has
                lines = droppable.read_text().splitlines() if droppable.is_file() else []
                stat = dict(line.split() for line in lines)
                yield int(most), int((group / used).read_text()) - int(stat.get(files, 0))
            if group == top:
                break
