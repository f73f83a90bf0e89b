"""Seconds of a GPU by what its kernels are for, from the events of torch's profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

MATMUL = "matrix products"
ATTENTION = "attention"
GATHER = "gather and segment sum"
ELEMENTWISE = "elementwise"
HEAD = "head"
OPTIMIZER = "optimizer"
COLLECTIVES = "collectives"
HOST_COPIES = "copies host/device"
DEVICE_COPIES = "copies on the device"
OTHER = "other"
IDLE = "idle"

# The first pattern that is found in a kernel's name gives its class, so the order counts: flash-attention 3 and 4 are
# CUTLASS kernels, and the compiler's have the names of what they fuse in their own.
PATTERNS: tuple[tuple[str, str], ...] = (
    (COLLECTIVES, r"^nccl"),
    # Inductor: pointwise, reductions, persistent reductions, for-each.
    (ELEMENTWISE, r"^triton_(poi|red|per|for|unk)_"),
    (HOST_COPIES, r"^Memcpy (HtoD|DtoH)"),
    # FSDP2 puts gathered weights in their places and gradients into one buffer with these.
    (DEVICE_COPIES, r"^Memcpy|^Memset|split_with_sizes_copy|chunk_cat"),
    # flash-attn 2, 3 and 4, torch's copy of 2, cuDNN's, and the memory-efficient kernels of SDPA.
    (ATTENTION, r"(?i)flash_?(att|fwd|bwd|fprop|bprop)|flash::|fmha|_sdpa_|scaled_dot_product|_varlen_attn"),
    # Cross entropy of flash-attn, and verl's fused linear cross entropy.
    (HEAD, r"cross_entropy|efficient_entropy|log_?softmax|SoftMax"),
    # Our sums over copies; index_select and index_add; embedding and its backward, which sorts tokens first.
    (GATHER, r"_sum_copies"),
    (GATHER, r"(?i)index_?(select|func|add|copy|put|elementwise)|indexing_backward|scatter|gather"),
    (GATHER, r"(?i)embedding|compute_grad_weight|sum_and_scatter|partials_per_segment|RadixSort"),
    (OPTIMIZER, r"(?i)fused_?(adam|sgd)|_foreach_|multi_tensor_apply"),
    # cuBLAS on Hopper (nvjet) and before (xmma, gemm), its split-K sums, and Inductor's templates.
    (MATMUL, r"(?i)^nvjet|gemm|gemv|cublas|splitKreduce|^cutlass|triton_(tem|mm)|dot_kernel"),
    (
        ELEMENTWISE,
        r"elementwise_kernel|reduce_kernel|CatArrayBatchedCopy|layer_norm|rms_?norm|RowwiseMoments|FillFunctor|tensor_kernel_scan",
    ),
)


def kernel_class(name: str) -> str:
    """What a kernel is for; ``OTHER`` for a name that no pattern knows."""
    for found, pattern in PATTERNS:
        if re.search(pattern, name):
            return found
    return OTHER


def seconds_by_class(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Seconds of the kernels and copies of a profile by class, the longest first.

    ``IDLE`` are those between the first and the last kernel in which none ran. Streams run at once, so the classes may
    add up to more than that time.
    """
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    seconds: Counter[str] = Counter()
    idle, busy_until = 0.0, float("inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.time_range.start):
        span = kernel.time_range
        seconds[kernel_class(kernel.name)] += (span.end - span.start) / 1e6
        idle += max(0.0, span.start - busy_until)
        busy_until = span.end if busy_until == float("inf") else max(busy_until, span.end)
    return dict(seconds.most_common()) | {IDLE: idle / 1e6}
