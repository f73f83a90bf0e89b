"""What is free for activations: on this rank's device, and in memory of the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from verl_pg_plugin.planning.activation_level import DEVICE_RESERVE, Room

HOST_RESERVE = 0.2
"""Of a host's memory, left free: what other processes of the run will still ask for."""
VERSION1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
"""Of control groups: their root, files of what they may hold and do hold, and what of that can be dropped."""


def room_of_rank(module: Any, beside: float, head: float, host: float) -> Room:
    """What this rank's device has for the activations of an update that is about to run; negative if less than none.

    Args:
        module: the sharded model; gradients that it does not have yet are counted.
        beside: bytes that the update takes beside tokens, gathered weights among them.
        head: bytes of the LM head, part of which runs while layers hold less than at the peak.
        host: bytes of the host for this rank.
    """
    free, total = torch.cuda.mem_get_info()
    allocated, limit = torch.cuda.memory_allocated(), torch.cuda.get_per_process_memory_fraction() * total
    usable = min(free + torch.cuda.memory_reserved() - allocated, limit - allocated)
    weights = [getattr(p, "_local_tensor", p) for p in module.parameters() if p.requires_grad and p.grad is None]
    gradients = sum(weight.nbytes for weight in weights if weight.device.type == "cuda")
    reserve = DEVICE_RESERVE * limit
    return Room(usable - gradients - beside - head - reserve, host, reserve + head)


def host_bytes(root: Path = Path("/")) -> float:
    """Memory that a rank may pin: what the machine or its container has, shared over the ranks of the node.

    ``root`` is where ``proc`` and ``sys`` are mounted.
    """
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
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield int(most), int((group / used).read_text()) - int(stat[files])
            if group == top:
                break
