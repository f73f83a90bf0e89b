"""All patches of functions and classes of other packages.

Each docstring has what is patched, why, the versions (default verl 0.9.1), and when to remove the patch. If the target
is gone or has other parameters, the patch raises ``UpstreamChangedError``. A patch applies once per process, or within
a context manager that undoes it.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from verl_pg_plugin.compat import SIGNATURES, difference, requirements


class UpstreamChangedError(RuntimeError):
    """The target of a patch is gone or has changed since the tested versions."""


def _checked(owner: Any, name: str, at_least: str = "") -> Any:
    """Return a function whose parameters include ``at_least``, or equal those in ``compat.SIGNATURES``."""
    path = f"{owner.__module__}.{owner.__name__}" if inspect.isclass(owner) else owner.__name__
    if why := difference(owner, name, at_least or SIGNATURES[f"{path}.{name}"], exactly=not at_least):
        package = path.partition(".")[0]
        raise UpstreamChangedError(f"{path}.{name} {why}; tested with {requirements('tested').get(package, package)}")
    return getattr(owner, name)


def _wrap(owner: Any, name: str, run: Callable[..., Any], at_least: str = "") -> None:
    """Replace a function by ``run``, whose first argument is the original function, once per process."""
    function = _checked(owner, name, at_least)
    if run.__qualname__ in (patches := getattr(function, "wrapped_by_verl_pg_plugin", ())):
        return

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(function, *args, **kwargs)

    wrapper.wrapped_by_verl_pg_plugin = (*patches, run.__qualname__)  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


@contextmanager
def _replaced(owner: Any, name: str, value: Any, at_least: str = "") -> Iterator[None]:
    original = _checked(owner, name, at_least)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def call_before(entry_point: str, action: Callable[[Any], None]) -> None:
    """Call ``action`` with the composed config of a run before one of verl's entry points uses it.

    What: ``verl.utils.config.validate_config`` or ``verl.trainer.main_ppo.run_ppo`` calls ``action(config)`` first.
    verl's own entry point imports only the former, after its plugins. Recipes import ``run_ppo`` and validate inside
    Ray or not at all.
    Why: verl passes ``actor.use_prefix_grouper=True`` to no engine and silently trains without sharing. It has no hook
    for plugins between the composition of a config and the start of Ray.
    Remove when: verl passes ``actor.use_prefix_grouper`` to its engines, or drops the flag.
    """

    def act_then_run(function: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        action(config)
        return function(config, *args, **kwargs)

    module, _, name = entry_point.rpartition(".")
    _wrap(importlib.import_module(module), name, act_then_run)


def regroup_after_balance(
    trainer_cls: type,
    regroup: Callable[[Any, Any, dict[str, Any], str], None],
    updated: Callable[[Any, dict[str, Any]], None],
) -> None:
    """Make trainers balance whole groups by cost, for any number of groups, and report the work of updates.

    What: ``_balance_batch`` of a trainer class (verl's V1 ``PPOTrainer``, V0 ``RayPPOTrainer`` or another) ends with a
    call of ``regroup``, and ``_update_actor`` with one of ``updated``. V0's own group balance is disabled through the
    attribute ``use_prefix_grouper``, which nothing else reads.
    Why: verl balances single samples. V0's group balance requires a number of groups that the ranks divide, counts a
    prompt once per response, and ignores mini-batches. Task runners import their trainer class or look it up in a
    registry that may change at any time.
    Remove when: trainers accept a balance function, or verl keeps groups together.
    """

    def balance_then_regroup(
        own: Any, self: Any, batch: Any, metrics: Any, logging_prefix: str = "global_seqlen", *args: Any, **kwargs: Any
    ) -> Any:
        self.use_prefix_grouper = False
        replaced = own(self, batch, metrics, logging_prefix, *args, **kwargs)
        regroup(self, batch if replaced is None else replaced, metrics, logging_prefix)
        return replaced

    def update_then_report(update: Any, self: Any, batch: Any, *metrics: Any, **kwargs: Any) -> Any:
        is_nested, self._pg_updates = getattr(self, "_pg_updates", False), True
        try:
            output = update(self, batch, *metrics, **kwargs)
        finally:
            self._pg_updates = is_nested
        if not is_nested:  # a subclass and its parent may both be patched
            returned = getattr(output, "meta_info", {}).get("metrics", {})  # in V0
            updated(self, metrics[0] if metrics else kwargs.get("metrics", returned))
        return output

    _checked(trainer_cls, "_update_actor", "batch")  # raise before the first patch
    _wrap(trainer_cls, "_balance_batch", balance_then_regroup, "batch metrics")
    _wrap(trainer_cls, "_update_actor", update_then_report, "batch")


def take_old_log_probs_from_update(
    trainer_cls: type, compute_or_postpone: Callable[..., Any], update_and_complete: Callable[..., Any]
) -> None:
    """Let verl's trainers postpone old log-probs until the update, which computes the same values.

    What: ``_compute_old_log_prob`` and ``_update_actor`` of verl's V1 ``PPOTrainer`` and V0 ``RayPPOTrainer`` become
    calls of the two functions, which get the original as their first argument.
    Why: verl runs a forward of its own for old log-probs, also where the update starts from the same weights
    (https://github.com/verl-project/verl/issues/3996).
    Remove when: verl takes old log-probs from the update where a batch is one optimizer step.
    """
    _wrap(trainer_cls, "_update_actor", update_and_complete, "batch")  # first: alone it changes nothing
    _wrap(trainer_cls, "_compute_old_log_prob", compute_or_postpone, "batch")


def run_when_shared(modeling: Any, name: str, packed: Callable[..., Any], *parameters: str) -> None:
    """Make a function of a modeling file call ``packed`` for layers that receive shared prefixes.

    What: the global ``name`` of ``modeling``, which has these parameters, passes a call with ``prefix_grouper`` to
    ``packed``. It drops the keyword if it is None.
    Why: Gated DeltaNet layers call two globals with the keywords of the model's forward.
    Versions: transformers 5.15 to 5.24; earlier versions store the functions in each layer.
    Remove when: transformers has an interface for linear attention.
    """

    def stock_or_packed(stock: Any, *args: Any, prefix_grouper: Any = None, **kwargs: Any) -> Any:
        if prefix_grouper is None:
            return stock(*args, **kwargs)
        return packed(*args, prefix_grouper=prefix_grouper, **kwargs)

    _wrap(modeling, name, stock_or_packed, " ".join(parameters))


def value_models_loaded_by(load: Callable[..., Any]) -> AbstractContextManager[None]:
    """Within the block, verl's FSDP engine of this process loads its value model with ``load``.

    What: ``verl.utils.model.load_valuehead_model``, which ``FSDPEngine._build_module`` imports when it is called.
    Why: the function hard-codes ``attn_implementation="flash_attention_2"``.
    Remove when: verl loads value models with the attention of their config.
    """
    import verl.utils.model as patched

    return _replaced(patched, "load_valuehead_model", load)


def forwards_left_alone() -> AbstractContextManager[None]:
    """Within the block, verl's FSDP engine of this process builds its model without replacing forwards.

    What: ``verl.workers.engine.fsdp.transformer_impl.apply_monkey_patch`` does nothing.
    Why: for Qwen3.5 it replaces forwards of transformers' classes in the whole process. Its forwards have no
    ``logits_to_keep`` and drop the keywords of the packed layout. Packed mode implements Ulysses and fused kernels
    itself.
    Remove when: verl's forwards of Qwen3.5 pass on unknown keywords.
    """
    from verl.workers.engine.fsdp import transformer_impl

    takes = "model use_remove_padding ulysses_sp_size"
    return _replaced(transformer_impl, "apply_monkey_patch", lambda **kwargs: None, takes)


def activation_offload_left_out() -> AbstractContextManager[None]:
    """Within the block, verl's FSDP engine of this process builds its model without verl's activation offload.

    What: ``verl.workers.engine.fsdp.transformer_impl.enable_activation_offloading`` does nothing.
    Why: ``engine/activations.py`` offloads activations. verl's handler wraps each layer in a reentrant checkpoint,
    which recomputes attention, and fails after an error or a forward without backward.
    Remove when: the engine has a method for it that can be overridden.
    """
    from verl.workers.engine.fsdp import transformer_impl

    return _replaced(transformer_impl, "enable_activation_offloading", lambda *args: None)


def use_single_gloo_backend() -> None:
    """Let verl's workers start a process group on the platform ``cpu``.

    What: the default of ``backend`` in ``verl.utils.distributed.initialize_global_process_group_ray`` becomes
    ``"cpu:gloo"``. It is set on the function object, for modules that imported the function by name.
    Why: verl builds ``cpu:gloo,<device>:<backend>``, which is an error if the device is ``cpu``.
    Versions: verl 0.9.1, torch 2.11 to 2.15. Only called when ``VERL_PLATFORM=cpu``.
    Remove when: verl omits the second pair for device ``cpu``.
    """
    from verl.utils import distributed

    patched = _checked(distributed, "initialize_global_process_group_ray")
    patched.__defaults__ = (*(patched.__defaults__ or ())[:-1], "cpu:gloo")  # backend is the last parameter


def use_unpinned_offload() -> None:
    """Let the FSDP2 reference model load without an accelerator.

    What: ``CPUOffloadPolicy`` in ``verl.workers.engine.fsdp.transformer_impl`` builds a policy without pinning.
    Why: verl gives forward-only FSDP2 models ``CPUOffloadPolicy(pin_memory=True)``; pinning requires an accelerator.
    Versions: verl 0.9.1, torch 2.11 to 2.15. Only called when ``VERL_PLATFORM=cpu``.
    Remove when: verl does not offload, or does not pin, for device ``cpu``.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    _checked(transformer_impl, "CPUOffloadPolicy")
    transformer_impl.CPUOffloadPolicy = lambda pin_memory=False: CPUOffloadPolicy(pin_memory=False)


def copy_saved_weights() -> None:
    """Let asynchronous trainers compute old log-probs with the weights that they saved.

    What: ``verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu`` returns copies of the weights.
    Why: it calls ``Tensor.cpu()``, which returns the weights themselves if they are on the CPU. Trainers that update
    several times for each transfer of weights then restore nothing.
    Versions: verl 0.9.1. Only called when ``VERL_PLATFORM=cpu``.
    Remove when: verl copies there, as its function for FSDP1 does.
    """
    from verl.utils import fsdp_utils

    def save_copies(save: Any, *args: Any) -> Any:
        shards, spec = save(*args)
        return {name: (shard.clone(), of_shard) for name, (shard, of_shard) in shards.items()}, spec

    _wrap(fsdp_utils, "fsdp2_sharded_save_to_cpu", save_copies)
