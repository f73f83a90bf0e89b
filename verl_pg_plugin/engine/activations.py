"""Activation checkpoints of decoder layers at the level of each micro-batch, and the memory that is free for them.

A checkpoint keeps a layer's inputs and, at the attention levels, the attention outputs; the backward recomputes the
rest. Levels ``on_host`` copy kept tensors to pinned memory after the layer. The backward of the next layer fetches
them, so the device holds at most two layers. Records refer to each other weakly: a freed graph frees its copies.
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
"""Bytes below which a tensor stays on the device."""
SLAB = 64 << 20
"""Bytes of a block of pinned memory; torch rounds blocks up to powers of two and pins a new one if no free one fits."""
HOST_RESERVE = 0.2
"""Fraction of the host's memory that is left to other processes of the run."""
VERSION1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
"""Of a cgroup version: mount point, file of the limit, file of the usage, key of the page cache that can be dropped."""


def checkpoint_layer(call: partial[Any], *args: Any) -> Any:
    """Run a decoder layer under the checkpoint of its context; replaces ``_gradient_checkpointing_func``.

    transformers passes the layer as a partial with all keywords, which include the context.
    """
    context: ForwardContext | None = call.keywords.get("prefix_grouper")
    if context is None or context.checkpoint is None or not torch.is_grad_enabled():
        return call(*args)
    return context.checkpoint(context, call, *args)


class LayerCheckpoints:
    """Activation checkpoints of one micro-batch; ``copier`` is None on a CPU."""

    def __init__(self, level: Level, copier: PinnedCopier | None) -> None:
        self.level, self._copier = level, copier if level.on_host else None
        self._last: Callable[[], CheckpointRecord | None] = lambda: None

    def run(self, context: ForwardContext, call: partial[Any], *args: Any) -> Any:
        """Run a layer with a new record, which its backward reads."""
        record, before = CheckpointRecord(self._copier, self._last), self._last()
        self._last = weakref.ref(record)
        if self.level.keeps_attention:
            call = partial(call, prefix_grouper=context.with_record(record))

        def layer(*args: Any) -> Any:  # runs in the forward and in each recomputation
            record.start()
            return call(*args)

        # Hooks around a checkpoint see only its inputs, which torch saves for autograd.
        hooks = saved_tensors_hooks(record.put, record.get) if self.level.on_host else nullcontext()
        with hooks:
            out = checkpoint(layer, *args, use_reentrant=False)
        if before is not None:
            before.leave_device()
        return out


class _Copy:
    """A tensor with a copy on the host; ``x`` is the tensor on the device, None while only the host has it."""

    def __init__(self, x: Tensor, like: Tensor, copier: PinnedCopier) -> None:
        self.x: Tensor | None = None  # ``__del__`` reads it if the host has no memory for the copy
        self.like, self.copier = like, copier
        self.host, self.event = copier.out(x)
        self.x = x

    def fetch(self) -> None:
        if self.x is None:
            self.x, self.event = self.copier.back(self.host, self.like)

    def leave_device(self) -> None:
        self.event.wait()  # for the copy
        self.x = None

    def __del__(self) -> None:
        if self.x is not None:  # after an error the graph is freed while the copy may still run
            self.leave_device()


class CheckpointRecord:
    """Tensors that one call of a checkpointed layer keeps for its recomputations; autograd's graph holds it."""

    def __init__(self, copier: PinnedCopier | None, before: Callable[[], CheckpointRecord | None]) -> None:
        self._copier, self._before = copier, before
        self._copies: list[_Copy] = []
        self._kept: list[tuple[Any, Any]] = []  # (out, lse) of each attention call, in call order
        self._runs = 0

    def start(self) -> None:
        """Begin the forward or a recomputation."""
        self._runs += 1
        self._replay = iter(self._kept)

    def computed(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Call ``compute`` in the forward; in a recomputation return what the forward kept, or raise RuntimeError."""
        if self._runs == 1:
            out, lse = compute()
            self._kept.append((self.put(out), self.put(lse)))
            return out, lse
        kept = next(self._replay, None)
        if kept is None:
            raise RuntimeError(
                "a layer calls attention more often when it is recomputed. Fix: set ++prefix_grouper.activations=all"
            )
        return self.get(kept[0]), self.get(kept[1])

    def put(self, x: Tensor) -> Any:
        x = x.detach()  # with its graph it would close a reference cycle through autograd, which gc cannot free
        if self._copier is None or x.nbytes < SMALLEST:
            return x
        like = torch.empty_like(x, device="meta")
        if like.stride() != x.stride():  # the copier needs a tensor without gaps
            return x
        self._copies.append(_Copy(x, like, self._copier))
        return self._copies[-1]

    def get(self, kept: Any) -> Tensor:
        """Return a tensor that ``put`` has kept, and start to fetch those of the previous layer."""
        if isinstance(kept, Tensor):
            return kept.detach()
        kept.fetch()  # unless the layer after this one has fetched it
        before = self._before()
        for copy in before._copies if before else ():
            copy.fetch()
        kept.event.wait()
        x, kept.x = kept.x, None
        return x

    def leave_device(self) -> None:
        for copy in self._copies:
            copy.leave_device()


class PinnedCopier:
    """Copies between a GPU and pinned memory on a separate stream, after all work that has been launched.

    Device memory belongs to the compute stream and is freed after that stream has waited for the copy. So no block
    needs ``record_stream``, which would delay its reuse.
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
        # The source may still be written, and kernels may still use the memory that the target reuses.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _pieces(self, nbytes: int) -> Iterator[Tensor]:
        """Yield pinned memory of ``nbytes`` in total, cut from slabs."""
        while nbytes:
            if self._used == len(self._slab):
                self._slab, self._used = torch.empty(SLAB, dtype=torch.uint8, pin_memory=True), 0
            piece = self._slab[self._used : self._used + nbytes]
            self._used, nbytes = self._used + len(piece), nbytes - len(piece)
            yield piece


def _parts(x: Tensor, host: list[Tensor]) -> tuple[Tensor, ...]:
    """Split the bytes of a tensor without gaps, in storage order, into parts of the lengths of ``host``."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).split(list(map(len, host)))


def memory_budget_of_rank(module: Any, gathered: float, head: float, host: float) -> MemoryBudget:
    """Return the bytes for activations of the next update; negative if the device is too full.

    Gradients that ``module`` does not have yet, ``gathered`` weights and the LM ``head`` are subtracted. The reserve
    includes the head's bytes: it runs while layers hold less than at the peak.
    """
    free, total = torch.cuda.mem_get_info()
    limit = torch.cuda.get_per_process_memory_fraction() * total
    usable = min(free + torch.cuda.memory_reserved(), limit) - torch.cuda.memory_allocated()
    weights = [getattr(p, "_local_tensor", p) for p in module.parameters() if p.requires_grad and p.grad is None]
    gradients = sum(weight.nbytes for weight in weights if weight.device.type == "cuda")
    reserve = DEVICE_RESERVE * limit
    return MemoryBudget(usable - gradients - gathered - head - reserve, host, reserve + head)


def host_bytes(root: Path = Path("/")) -> float:
    """Return the bytes that a rank may pin: free memory of the machine or container over the ranks of the node."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    machine = {fields[0]: 1024 * int(fields[1]) for fields in lines if len(fields) == 3}
    free = machine["MemAvailable:"] - HOST_RESERVE * machine["MemTotal:"]
    for limit, used in _limits(root):
        free = min(free, limit * (1 - HOST_RESERVE) - used)
    # verl's workers set LOCAL_WORLD_SIZE to 1 if it is not set, even with several ranks on the node.
    ranks = os.environ.get("RAY_LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1
    return max(free, 0.0) / int(ranks)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and usage in bytes of each cgroup of this process; usage leaves out droppable page cache."""
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, limit, used, files = VERSION1 if controllers else VERSION2
        top = root / mounted
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):  # a container may not show the whole path
            if (group / limit).is_file() and (most := (group / limit).read_text().strip()) != "max":
                file = group / "memory.stat"
                stat = dict(line.split() for line in file.read_text().splitlines()) if file.is_file() else {}
                yield int(most), int((group / used).read_text()) - int(stat.get(files, 0))
            if group == top:
                break
