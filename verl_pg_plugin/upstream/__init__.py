"""Every change to a function or class of other people's that stays or is theirs to call, and nothing else.

Objects are changed where they are built: the head of one model (``engine/heads/lm_head.py``), the config of one engine
(``engine/shared_prefix_engine.py``). Names are entered into verl's registries where they belong (``cpu/__init__.py``).

Each function says what it changes, why, in which versions, and when it can go. A patch that no longer fits
the code it was written for raises instead of half applying.
"""

from verl_pg_plugin.upstream.changed import (
    UpstreamChangedError,
)
from verl_pg_plugin.upstream.cpu import (
    use_single_gloo_backend,
    use_unpinned_offload,
)
from verl_pg_plugin.upstream.engines import (
    drop_unreduced_gradients,
    forget_failed_pass,
    forget_offloaded_activations,
    forwards_left_alone,
    micro_batches_cut_by,
    value_models_loaded_by,
)
from verl_pg_plugin.upstream.entry_points import (
    call_before_run,
    call_before_validation,
)
from verl_pg_plugin.upstream.trainers import (
    look_up_group_trainers,
    regroup_after_v0_balance,
    verls_groups_off,
)

__all__ = [
    "UpstreamChangedError",
    "call_before_run",
    "call_before_validation",
    "drop_unreduced_gradients",
    "forget_failed_pass",
    "forget_offloaded_activations",
    "forwards_left_alone",
    "look_up_group_trainers",
    "micro_batches_cut_by",
    "regroup_after_v0_balance",
    "use_single_gloo_backend",
    "use_unpinned_offload",
    "value_models_loaded_by",
    "verls_groups_off",
]
