"""What a kernel of a training step is for, by its name.

Names are those that the profiler shows: of CUDA kernels and copies, demangled, and of aten's operators, which stand for
kernels on a CPU. The first row whose pattern is found anywhere in a name gives its class, so the order counts:
flash-attention 3 and 4 are CUTLASS kernels, and the compiler's have the names of what they fuse in their own.
"""

from __future__ import annotations

import re

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

CLASSES = (
    MATMUL,
    ATTENTION,
    GATHER,
    ELEMENTWISE,
    HEAD,
    OPTIMIZER,
    COLLECTIVES,
    HOST_COPIES,
    DEVICE_COPIES,
    OTHER,
    IDLE,
)
"""In the order in which tables and pictures show them."""

PATTERNS: tuple[tuple[str, str], ...] = (
    # NCCL, and on a CPU gloo and the bookkeeping around both.
    (COLLECTIVES, r"^nccl|^gloo:|^c10d::|record_param_comms|_c10d_functional::"),
    # Inductor: pointwise, reductions, persistent reductions, for-each.
    (ELEMENTWISE, r"^triton_(poi|red|per|for|unk)_"),
    (HOST_COPIES, r"^Memcpy (HtoD|DtoH)"),
    # FSDP2 puts gathered weights in their places and gradients into one buffer with these.
    (DEVICE_COPIES, r"^Memcpy|^Memset|split_with_sizes_copy|chunk_cat"),
    # flash-attn 2, 3 and 4, torch's copy of 2, cuDNN's, and the memory-efficient kernels of SDPA.
    (ATTENTION, r"(?i)flash_?(att|fwd|bwd|fprop|bprop)|flash::|fmha|_sdpa_|scaled_dot_product|_varlen_attn"),
    # Cross entropy of flash-attn, and verl's fused linear cross entropy.
    (HEAD, r"cross_entropy|efficient_entropy|log_?softmax|SoftMax"),
    # Our sums over readers; index_select and index_add; embedding and its backward, which sorts tokens first.
    (GATHER, r"_sum_readers|_segment_sum"),
    (GATHER, r"(?i)index_?(select|func|add|copy|put|elementwise)|indexing_backward|scatter|gather"),
    (GATHER, r"(?i)embedding|compute_grad_weight|sum_and_scatter|partials_per_segment|RadixSort|aten::index$"),
    (OPTIMIZER, r"(?i)fused_?(adam|sgd)|_foreach_|multi_tensor_apply"),
    # cuBLAS on Hopper (nvjet) and before (xmma, gemm), its split-K sums, and Inductor's templates.
    (MATMUL, r"(?i)^nvjet|gemm|gemv|cublas|splitKreduce|^cutlass|triton_(tem|mm)|dot_kernel"),
    (MATMUL, r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|mkldnn_linear)|mkldnn::"),
    (
        ELEMENTWISE,
        r"elementwise_kernel|reduce_kernel|CatArrayBatchedCopy|layer_norm|rms_?norm|RowwiseMoments|FillFunctor|tensor_kernel_scan",
    ),
    (
        ELEMENTWISE,
        r"aten::(_?to(_copy)?|add|sub|rsub|mul|div|neg|pow|exp|log|sqrt|rsqrt|square|silu|sigmoid|clamp|min|max|mean|sum|"
        r"cumsum|diff|where|cos|sin|copy|fill|zero|cat|stack|clone|contiguous|constant_pad_nd|pad|eq|ne|lt|gt|le|ge|"
        r"bitwise_\w+|logical_\w+|isfinite|abs|any|all|aminmax|amax|arange|logsumexp|masked_fill|silu_backward)_?$",
    ),
)


def kernel_class(name: str) -> str:
    """One of ``CLASSES``; ``OTHER`` for a name that no pattern knows."""
    for found, pattern in PATTERNS:
        if re.search(pattern, name):
            return found
    return OTHER
