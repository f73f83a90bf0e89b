"""The segment sum on a GPU: the Triton kernel where it is the faster route, torch's scatter-add elsewhere."""

import functools
import importlib.util
import logging
from typing import Any

import torch

from verl_pg_plugin.packing.segment_sum import check_id_range, scatter_sum, widen

logger = logging.getLogger(__name__)

# The kernel compares every token with every segment and keeps a sum of each in registers. Beyond this many, sums
# spill, while atomic adds (scatter-add) collide less and less.
MAX_KERNEL_SEGMENTS = 64


def segment_sum_cuda(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """`batch_unsorted_segment_sum` for CUDA tensors of checked shapes and dtypes; raises IndexError as it does."""
    if num_segments <= MAX_KERNEL_SEGMENTS and values.is_floating_point() and values.numel() and triton_installed():
        return _KernelSegmentSum.apply(values, segment_ids, num_segments)
    check_id_range(segment_ids, num_segments)
    return scatter_sum(widen(values), segment_ids.long(), num_segments).to(values.dtype)


@functools.cache
def triton_installed() -> bool:
    """Whether the kernel can be used; the answer is logged once a process."""
    installed = importlib.util.find_spec("triton") is not None
    logger.info(
        "segment sum on GPU: %s",
        "Triton kernel" if installed else "torch scatter_add (pip install triton for the faster kernel)",
    )
    return installed


class _KernelSegmentSum(torch.autograd.Function):
    """Forward: the kernel. Backward: each token's gradient is that of its segment, a gather."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
        from verl_pg_plugin.packing.segment_sum_triton import launch_segment_sum

        with torch.cuda.device(values.device):  # Triton launches on the current device, whatever its arguments' is
            sums, has_bad_id = launch_segment_sum(values, segment_ids, num_segments)
        if has_bad_id.cpu().numpy().any():
            check_id_range(segment_ids, num_segments)
        ctx.save_for_backward(segment_ids)
        return sums

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (segment_ids,) = ctx.saved_tensors
        return grad_outputs[0].gather(1, segment_ids.long()), None, None
