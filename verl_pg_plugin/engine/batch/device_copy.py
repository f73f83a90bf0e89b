"""A micro-batch on the device, without waiting for what the device still has to do."""

import torch
from tensordict import TensorDict

from verl_pg_plugin.attention.gather import send


def on_device(micro_batch: TensorDict, device: torch.device) -> TensorDict:
    """The same micro-batch, on ``device`` as soon as the work before it is done there.

    verl moves a micro-batch with ``micro_batch.to(device)``, for which torch copies the offsets of every jagged field
    from pageable memory: each of these copies waits for the backward of the micro-batch before, and the device then for
    the host, which only now begins to launch the forward. What is on the device already verl leaves as it is.

    Args:
        micro_batch: on the host. Jagged fields with gaps, or ragged in another than their second dimension, and what is
            no tensor, go the way they would in verl.
        device: of this process.
    """
    sent: dict[str, torch.Tensor] = {}
    # Fields with the same offsets have one raggedness, and keep it.
    bounds: dict[int, tuple[torch.Tensor, int, int]] = {}
    for name, field in micro_batch.items():
        if not isinstance(field, torch.Tensor):
            continue
        if not field.is_nested:
            sent[name] = send(field, device)
        elif field.layout == torch.jagged and field.lengths() is None and getattr(field, "_ragged_idx", 1) == 1:
            offsets = field.offsets()
            if id(offsets) not in bounds:
                lengths = offsets.diff()
                bounds[id(offsets)] = send(offsets, device), int(lengths.min()), int(lengths.max())
            there, shortest, longest = bounds[id(offsets)]
            sent[name] = torch.nested.nested_tensor_from_jagged(
                send(field.values(), device), there, min_seqlen=shortest, max_seqlen=longest
            )
    moved = micro_batch.exclude(*sent).to(device)
    for name, field in sent.items():
        moved[name] = field
    return moved
