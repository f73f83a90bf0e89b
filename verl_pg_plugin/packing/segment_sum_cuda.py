"""The segment sum on a GPU: on the host where it is tiny, else the Triton kernel or torch's scatter-add."""

import functools
import importlib.util
import logging

import torch

from verl_pg_plugin.packing.segment_sum_scatter import check_id_range, sum_by_scatter

logger = logging.getLogger(__name__)

# The kernel compares every token with every segment and keeps a sum of each in registers. Beyond this many, sums
# spill, while atomic adds (scatter-add) collide less and less.
MAX_KERNEL_SEGMENTS = 64
# Up to this many tokens, two copies to the host and one back cost less than launching a kernel and reading its flag.
MAX_HOST_TOKENS = 1 << 13


def segment_sum_cuda(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """`batch_unsorted_segment_sum` for CUDA tensors of checked shapes and dtypes; raises IndexError as it does."""
    if values.numel() <= MAX_HOST_TOKENS:
        return sum_on_host(values, segment_ids, num_segments)
    if num_segments <= MAX_KERNEL_SEGMENTS and values.is_floating_point() and triton_installed():
        return sum_by_kernel(values, segment_ids, num_segments)
    return sum_by_scatter(values, segment_ids, num_segments)


def sum_on_host(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """The CPU's sum, which checks the ids by itself, with the one wait that any check needs."""
    # Contiguous ids are copied without a temporary; their copy is complete once the next one is, on the same stream.
    ids = segment_ids.contiguous().to("cpu", non_blocking=True)
    sums = sum_by_scatter(values.to("cpu"), ids, num_segments)
    return sums.to(values.device, non_blocking=True)


def sum_by_kernel(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """One launch sums and flags ids out of range; reading the flags is the one wait."""
    from verl_pg_plugin.packing.segment_sum_triton import launch_segment_sum

    with torch.cuda.device(values.device):  # Triton launches on the current device, whatever its arguments' is
        sums, has_bad_id = launch_segment_sum(values, segment_ids, num_segments)
    if has_bad_id.cpu().numpy().any():
        check_id_range(segment_ids, num_segments)
    return sums


@functools.cache
def triton_installed() -> bool:
    """Whether the kernel can be used; the answer is logged once a process."""
    installed = importlib.util.find_spec("triton") is not None
    logger.info(
        "segment sum on GPU: %s",
        "Triton kernel" if installed else "torch scatter_add (pip install triton for the faster kernel)",
    )
    return installed
