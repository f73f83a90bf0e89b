"""Every patch of a function or class of another package, and nothing else.

Objects are changed where they are built: the head of one model and the config of one engine in ``engine/``. Names are
entered into verl's registries where they belong (``cpu/__init__.py``).

Each function says what it changes, why, in which versions (verl 0.9.1 where it names none), and when it can go. Where
what it replaces is gone or takes other parameters it raises ``UpstreamChangedError``, instead of half applying. A
function is replaced once per process and for good, or within a block and put back at its end.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from verl_pg_plugin.compat import TAKES, difference, requirements


class UpstreamChangedError(RuntimeError):
    """What a patch is about to replace is gone, or no longer looks as it did in the versions the patch names."""


def _found(owner: Any, name: str, at_least: str = "") -> Any:
    """A function of a module or class that takes these parameters and more, or exactly those that ``compat`` names."""
    path = f"{owner.__module__}.{owner.__name__}" if inspect.isclass(owner) else owner.__name__
    if why := difference(owner, name, at_least or TAKES[f"{path}.{name}"], exactly=not at_least):
        package = path.partition(".")[0]
        raise UpstreamChangedError(f"{path}.{name} {why}; tested with {requirements('tested').get(package, package)}")
    return getattr(owner, name)


def _wrap(owner: Any, name: str, run: Callable[..., Any], at_least: str = "") -> None:
    """Let calls of a function be calls of ``run`` with the function in front, once in a process."""
    function = _found(owner, name, at_least)
    if hasattr(function, "wrapped_by_verl_pg_plugin"):
        return

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(function, *args, **kwargs)

    wrapper.wrapped_by_verl_pg_plugin = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


@contextmanager
def _replaced(owner: Any, name: str, value: Any, at_least: str = "") -> Iterator[None]:
    own = _found(owner, name, at_least)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def call_before(entry_point: str, action: Callable[[Any], None]) -> None:
    """Show ``action`` the composed config of a run before one of verl's entry points goes on with it.

    What: ``verl.utils.config.validate_config`` or ``verl.trainer.main_ppo.run_ppo`` calls ``action(config)`` first.
    verl's own entry point imports the former by name after verl has loaded its plugins, and has the latter as
    ``__main__.run_ppo``. Those of recipes, verl's one-step-off and fully async ones among them, validate their config
    inside Ray or not at all, and import the latter when they run.
    Why: ``python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_prefix_grouper=True`` trains without sharing
    anything and says nothing: the flag is in verl's config and in no engine config, and verl has no hook for plugins
    between the composition of a config and the start of Ray.
    Remove when: verl hands ``actor.use_prefix_grouper`` to its engines, or drops the flag.
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
    """Let trainers assign whole groups by what they cost, whatever their number, and show what updates computed.

    What: ``_balance_batch`` of verl's V1 ``PPOTrainer``, its V0 ``RayPPOTrainer`` or a class with methods of its own
    calls ``regroup`` at the end, ``_update_actor`` ``updated``. V0's own balance of groups, behind the attribute
    ``use_prefix_grouper`` that nothing else reads, is left out.
    Why: verl assigns single samples. V0's balance of groups refuses a number of them that the ranks do not divide,
    weighs a prompt once for each of its responses, and lets mini-batches fall where they may. Task runners name their
    trainer's class or look it up in a registry that others fill at any time.
    Remove when: trainers take a balance, or the order of groups is verl's own.
    """

    def balance_then_regroup(
        own: Any, self: Any, batch: Any, metrics: Any, logging_prefix: str = "global_seqlen", *args: Any, **kwargs: Any
    ) -> Any:
        self.use_prefix_grouper = False
        replaced = own(self, batch, metrics, logging_prefix, *args, **kwargs)
        regroup(self, batch if replaced is None else replaced, metrics, logging_prefix)
        return replaced

    def update_then_show(update: Any, self: Any, batch: Any, *metrics: Any, **kwargs: Any) -> Any:
        within, self._pg_updates = getattr(self, "_pg_updates", False), True
        try:
            output = update(self, batch, *metrics, **kwargs)
        finally:
            self._pg_updates = within
        if not within:  # a class that calls its parent's method has both replaced
            returned = getattr(output, "meta_info", {}).get("metrics", {})  # by V0
            updated(self, metrics[0] if metrics else kwargs.get("metrics", returned))
        return output

    _found(trainer_cls, "_update_actor", "batch")  # or neither is replaced
    _wrap(trainer_cls, "_balance_batch", balance_then_regroup, "batch metrics")
    _wrap(trainer_cls, "_update_actor", update_then_show, "batch")


def run_when_shared(modeling: Any, name: str, packed: Callable[..., Any], *parameters: str) -> None:
    """Let a function of a model's file, of these parameters, be ``packed`` for layers that are handed shared prefixes.

    What: the global ``name`` of ``modeling`` hands a call with a ``prefix_grouper`` on to ``packed``, and drops the
    keyword where it is None.
    Why: layers of Gated DeltaNet call two functions of their file by name, with the keywords of the model's forward;
    transformers has no registry for them.
    Versions: transformers 5.15 to 5.24; earlier ones keep the functions in each layer.
    Remove when: transformers has an interface for linear attention, as it has one for attention.
    """

    def stock_or_packed(stock: Any, *args: Any, prefix_grouper: Any = None, **kwargs: Any) -> Any:
        if prefix_grouper is None:
            return stock(*args, **kwargs)
        return packed(*args, prefix_grouper=prefix_grouper, **kwargs)

    _wrap(modeling, name, stock_or_packed, " ".join(parameters))


def value_models_loaded_by(load: Callable[..., Any]) -> AbstractContextManager[None]:
    """Within the block, verl's FSDP engine of this process loads its value model with ``load``.

    What: ``verl.utils.model.load_valuehead_model``, which ``FSDPEngine._build_module`` imports when it is called.
    Why: the function loads every value model with ``attn_implementation="flash_attention_2"``, whatever the model
    config says, and has no argument for it.
    Remove when: verl loads value models with the attention of their config.
    """
    import verl.utils.model as patched

    return _replaced(patched, "load_valuehead_model", load)


def forwards_left_alone() -> AbstractContextManager[None]:
    """Within the block, verl's FSDP engine of this process builds its model without replacing forwards.

    What: ``apply_monkey_patch`` as ``verl.workers.engine.fsdp.transformer_impl`` sees it does nothing.
    Why: for Qwen3.5 it puts its own forwards into transformers' classes, for all models of the process. They take no
    ``logits_to_keep`` and drop the keywords that say which tokens are shared. What else the engine asks of it, Ulysses
    and fused kernels, packed mode does by other means.
    Remove when: verl's forwards of Qwen3.5 hand on the keywords that they do not know.
    """
    from verl.workers.engine.fsdp import transformer_impl

    takes = "model use_remove_padding ulysses_sp_size"
    return _replaced(transformer_impl, "apply_monkey_patch", lambda **kwargs: None, takes)


def activation_offload_left_out() -> AbstractContextManager[None]:
    """Within the block, verl's FSDP engine of this process builds its model without verl's activation offload.

    What: ``enable_activation_offloading`` as ``verl.workers.engine.fsdp.transformer_impl`` sees it does nothing.
    Why: ``engine/activations.py`` takes what layers keep to the host. verl's handler wraps each layer into a reentrant
    checkpoint of its own, which recomputes attention, and fails behind an error or a forward without backward.
    Remove when: the engine asks a method for it that can be overridden.
    """
    from verl.workers.engine.fsdp import transformer_impl

    return _replaced(transformer_impl, "enable_activation_offloading", lambda *args: None)


def use_single_gloo_backend() -> None:
    """Let verl's workers start a process group on the platform ``cpu``.

    What: the default of ``backend`` in ``verl.utils.distributed.initialize_global_process_group_ray`` becomes
    ``"cpu:gloo"``. The default is set on the function object, so modules that imported it by name see it too.
    Why: verl builds ``cpu:gloo,<device>:<backend>``; with device ``cpu`` that names one device twice, an error.
    Versions: verl 0.9.1, torch 2.11 to 2.15. Only called when ``VERL_PLATFORM=cpu``.
    Remove when: verl leaves the second pair out for device ``cpu``.
    """
    from verl.utils import distributed

    patched = _found(distributed, "initialize_global_process_group_ray")
    patched.__defaults__ = (*(patched.__defaults__ or ())[:-1], "cpu:gloo")  # backend is the last parameter


def use_unpinned_offload() -> None:
    """Let the FSDP2 reference model load where there is no accelerator to pin memory for.

    What: ``CPUOffloadPolicy`` in ``verl.workers.engine.fsdp.transformer_impl`` builds a policy without pinning.
    Why: verl gives forward-only FSDP2 models ``CPUOffloadPolicy(pin_memory=True)``; pinning asks for an
    accelerator and fails with "Cannot access accelerator device when none is available".
    Versions: verl 0.9.1, torch 2.11 to 2.15. Only called when ``VERL_PLATFORM=cpu``.
    Remove when: verl leaves offloading, or pinning, out for device ``cpu``.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    _found(transformer_impl, "CPUOffloadPolicy")
    transformer_impl.CPUOffloadPolicy = lambda pin_memory=False: CPUOffloadPolicy(pin_memory=False)
