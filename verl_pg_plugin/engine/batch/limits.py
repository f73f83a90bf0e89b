"""How large verl lets a micro-batch be."""

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.engine.batch.sequences import BatchError
from verl_pg_plugin.planning.micro_batches import MicroBatchLimits


def limits_of(data: TensorDict, sp_size: int) -> MicroBatchLimits:
    """The limit that verl's flags select; see ``verl.workers.engine.utils.prepare_micro_batches``.

    Raises:
        BatchError: it is not set.
    """
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        return MicroBatchLimits(max_tokens=_required(data, "max_token_len_per_gpu") * sp_size)
    return MicroBatchLimits(max_sequences=_required(data, "micro_batch_size_per_gpu"))


def _required(data: TensorDict, name: str) -> int:
    limit = tu.get_non_tensor_data(data, name, default=None)
    if limit is None:
        raise BatchError(f"{name} is not set: it bounds the size of a micro-batch")
    return int(limit)
