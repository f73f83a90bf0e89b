"""Every change to a function or class of other people's that stays or is theirs to call, and nothing else.

Objects are changed where they are built: the head of one model (``engine/heads/lm_head.py``), the config of one engine
(``engine/shared_prefix_engine.py``). Names are entered into verl's registries where they belong (``cpu/__init__.py``).

Each function says what it changes, why, in which versions, and when it can go. A patch that no longer fits
the code it was written for raises instead of half applying.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict

CutMicroBatches = Callable[[TensorDict, Any], tuple[list[TensorDict], list[list[int]]]]


class UpstreamChangedError(RuntimeError):
    """A patched function no longer looks as it did in the versions the patch names."""


def use_single_gloo_backend() -> None:
    """Let verl's workers start a process group on the platform ``cpu``.

    What: the default of ``backend`` in ``verl.utils.distributed.initialize_global_process_group_ray`` becomes
    ``"cpu:gloo"``. The default is set on the function object, so modules that imported it by name see it too.
    Why: verl builds ``cpu:gloo,<device>:<backend>``; with device ``cpu`` that names one device twice, which
    torch refuses.
    Versions: verl 0.9.1, torch 2.11 to 2.13. Only called when ``VERL_PLATFORM=cpu``.
    Remove when: verl leaves the second pair out for device ``cpu``.

    Raises:
        UpstreamChangedError: the function's parameters are not ``(timeout_second=None, backend=None)``.
    """
    from verl.utils.distributed import initialize_global_process_group_ray as patched

    defaults = {name: parameter.default for name, parameter in inspect.signature(patched).parameters.items()}
    if defaults == {"timeout_second": None, "backend": "cpu:gloo"}:
        return
    if defaults != {"timeout_second": None, "backend": None}:
        raise UpstreamChangedError(
            f"verl.utils.distributed.initialize_global_process_group_ray now takes {defaults}; the cpu platform "
            "needs verl>=0.9.1,<0.10"
        )
    patched.__defaults__ = (None, "cpu:gloo")


def use_unpinned_offload() -> None:
    """Let the FSDP2 reference model load where there is no accelerator to pin memory for.

    What: ``CPUOffloadPolicy`` in ``verl.workers.engine.fsdp.transformer_impl`` builds a policy without pinning.
    Why: verl gives forward-only FSDP2 models ``CPUOffloadPolicy(pin_memory=True)``; pinning asks for an
    accelerator and fails with "Cannot access accelerator device when none is available".
    Versions: verl 0.9.1, torch 2.11 to 2.13. Only called when ``VERL_PLATFORM=cpu``.
    Remove when: verl leaves offloading, or pinning, out for device ``cpu``.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    def unpinned(pin_memory: bool = False) -> CPUOffloadPolicy:
        return CPUOffloadPolicy(pin_memory=False)

    if not hasattr(transformer_impl, "CPUOffloadPolicy"):
        raise UpstreamChangedError(
            "verl.workers.engine.fsdp.transformer_impl no longer uses CPUOffloadPolicy; the cpu platform needs "
            "verl>=0.9.1,<0.10"
        )
    transformer_impl.CPUOffloadPolicy = unpinned


def call_before_validation(action: Callable[[Any], None]) -> None:
    """Show ``action`` the composed config of a run of verl's entry points before they validate it.

    What: ``verl.utils.config.validate_config`` calls ``action(config)`` first. Entry points import it by name after
    verl has loaded its plugins, so they get this one; put in once per process and left there.
    Why: ``python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_prefix_grouper=True`` trains without sharing
    anything and says nothing: the flag is in verl's config and in no engine config, and verl has no hook for plugins
    between the composition of a config and the start of Ray.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: verl hands ``actor.use_prefix_grouper`` to its engines, or drops the flag.

    Raises:
        UpstreamChangedError: the function's parameters are not ``(config, use_reference_policy, use_critic)``.
    """
    import verl.utils.config as patched

    validate = patched.validate_config
    if getattr(validate, "calls_before", False):
        return
    if list(inspect.signature(validate).parameters) != ["config", "use_reference_policy", "use_critic"]:
        raise UpstreamChangedError(
            f"verl.utils.config.validate_config now takes {inspect.signature(validate)}; the plugin needs "
            "verl>=0.9.0,<0.10"
        )

    @functools.wraps(validate)
    def act_then_validate(config: Any, *args: Any, **kwargs: Any) -> Any:
        action(config)
        return validate(config, *args, **kwargs)

    act_then_validate.calls_before = True  # type: ignore[attr-defined]
    patched.validate_config = act_then_validate


def call_before_run(action: Callable[[Any], None]) -> None:
    """Show ``action`` the composed config of every run that verl's ``run_ppo`` starts, before it starts Ray.

    What: ``verl.trainer.main_ppo.run_ppo`` calls ``action(config)`` first. Put in once per process and left there.
    Why: entry points of recipes, verl's one-step-off and fully async ones among them, validate their config inside Ray
    or not at all; they import this function when they run. verl's own entry point does not pass through here: run with
    ``python -m`` it is another module, ``__main__`` (see :func:`call_before_validation`).
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: verl hands ``actor.use_prefix_grouper`` to its engines, or drops the flag.

    Raises:
        UpstreamChangedError: the function's parameters are not ``(config, task_runner_class)``.
    """
    import verl.trainer.main_ppo as patched

    run_ppo = patched.run_ppo
    if getattr(run_ppo, "calls_before", False):
        return
    if list(inspect.signature(run_ppo).parameters) != ["config", "task_runner_class"]:
        raise UpstreamChangedError(
            f"verl.trainer.main_ppo.run_ppo now takes {inspect.signature(run_ppo)}; the plugin needs verl>=0.9.0,<0.10"
        )

    @functools.wraps(run_ppo)
    def act_then_run(config: Any, *args: Any, **kwargs: Any) -> None:
        action(config)
        run_ppo(config, *args, **kwargs)

    act_then_run.calls_before = True  # type: ignore[attr-defined]
    patched.run_ppo = act_then_run


def look_up_group_trainers(prefix: str, keep_groups: Callable[[type], type]) -> None:
    """Let verl find, under ``prefix`` and the name of any V1 trainer, that trainer with groups kept together.

    What: ``verl.trainer.ppo.v1.get_trainer_cls`` returns ``keep_groups(cls)`` for such a name, unless somebody has
    registered a class under the whole name. The task runner imports it from there when it runs; put in once per process
    and left there.
    Why: the registry holds one class per name, and others register theirs at any time, also after this plugin has been
    loaded; verl has no hook between looking a trainer up and building it.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: V1 trainers take a balance, or the order of groups is verl's own.

    Raises:
        UpstreamChangedError: the function's parameters are not ``(name)``.
    """
    from verl.trainer.ppo import v1

    look_up = v1.get_trainer_cls
    if getattr(look_up, "keeps_groups", False):
        return
    if list(inspect.signature(look_up).parameters) != ["name"]:
        raise UpstreamChangedError(
            f"verl.trainer.ppo.v1.get_trainer_cls now takes {inspect.signature(look_up)}; the plugin needs "
            "verl>=0.9.0,<0.10"
        )

    @functools.wraps(look_up)
    def look_up_with_groups(name: str) -> type:
        plain = name.removeprefix(prefix)
        if plain == name or name in v1.trainer_base.TRAINER_REGISTRY:
            return look_up(name)
        return keep_groups(look_up(plain))

    look_up_with_groups.keeps_groups = True  # type: ignore[attr-defined]
    v1.get_trainer_cls = look_up_with_groups


def regroup_after_v0_balance(regroup: Callable[[Any, Any, dict[str, Any], str], None]) -> None:
    """Let V0 trainers deal whole groups out by what they cost, whatever their number.

    What: ``verl.trainer.ppo.ray_trainer.RayPPOTrainer._balance_batch`` of a trainer whose ``use_prefix_grouper`` is set
    balances as without it, and then calls ``regroup(trainer, batch, metrics, logging_prefix)``. Put in once per process
    and left there; trainers that share nothing are balanced as before.
    Why: with the flag verl refuses a number of groups that the ranks do not divide, weighs a prompt once for each of
    its responses, and lets mini-batches fall where they may. V0's task runners, verl's own and those of its recipes,
    name their trainer's class, so that no other class can be handed in.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: V0 looks its trainer up by config, or is gone.

    Raises:
        UpstreamChangedError: the method's parameters are not ``(self, batch, metrics, logging_prefix,
            keep_minibatch)``.
    """
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    balance = RayPPOTrainer._balance_batch
    if getattr(balance, "keeps_groups", False):
        return
    if list(inspect.signature(balance).parameters) != ["self", "batch", "metrics", "logging_prefix", "keep_minibatch"]:
        raise UpstreamChangedError(
            f"RayPPOTrainer._balance_batch now takes {inspect.signature(balance)}; the V0 trainer needs "
            "verl>=0.9.0,<0.10"
        )

    @functools.wraps(balance)
    def balance_then_regroup(
        self: Any,
        batch: Any,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> None:
        if not self.use_prefix_grouper:
            return balance(self, batch, metrics, logging_prefix, keep_minibatch)
        self.use_prefix_grouper = False
        try:
            balance(self, batch, metrics, logging_prefix, keep_minibatch)
        finally:
            self.use_prefix_grouper = True
        regroup(self, batch, metrics, logging_prefix)

    balance_then_regroup.keeps_groups = True  # type: ignore[attr-defined]
    RayPPOTrainer._balance_batch = balance_then_regroup


def show_config_by(show: Callable[[Any], None]) -> None:
    """Let verl's task runners hand the config to ``show`` where they would print it.

    What: ``pprint`` as ``verl.trainer.main_ppo`` sees it, and ``__main__`` where that is the running entry point. Ray
    copies task runners with the names that they see, so it counts in the process that starts them. Left there.
    Why: each run begins with 1,000 lines of config, and there is no setting for it. Hydra keeps the same in a file.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: verl leaves the config out of the log, or asks a setting.

    Args:
        show: a function of a module, which Ray can send by name; takes what verl would have printed.

    Raises:
        UpstreamChangedError: the entry point no longer prints the config by that name.
    """
    from verl.trainer import main_ppo

    main = sys.modules["__main__"]
    running = getattr(getattr(main, "__spec__", None), "name", "") == "verl.trainer.main_ppo"
    for module in (main_ppo, *([main] if running else [])):
        if not hasattr(module, "pprint"):
            raise UpstreamChangedError(
                "verl.trainer.main_ppo no longer prints the config with pprint; set prefix_grouper.console=full"
            )
        module.pprint = show


@contextmanager
def steps_shown_by(console: Any) -> Iterator[None]:
    """Within the block, verl's V1 trainer of this process shows steps on ``console`` and no progress bar beside it.

    What: ``verl.utils.logger.LocalLogger``, which ``verl.utils.tracking.Tracking`` imports when it is built with the
    logger ``console``, and ``tqdm`` as ``verl.trainer.ppo.v1.trainer_base`` sees it; put back at the end of the block.
    Why: a step is one line of a hundred metrics, and loggers of other plugins cannot be registered.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: ``Tracking`` takes loggers of other packages.

    Args:
        console: has ``log(data, step)`` and ``flush()``.

    Raises:
        UpstreamChangedError: one of the two is gone.
    """
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils import logger as loggers

    if not (hasattr(loggers, "LocalLogger") and hasattr(trainer_base, "tqdm")):
        raise UpstreamChangedError("verl's console logger or progress bar has moved; set prefix_grouper.console=full")
    local_logger, tqdm = loggers.LocalLogger, trainer_base.tqdm
    loggers.LocalLogger = lambda print_to_console=True: console
    trainer_base.tqdm = functools.partial(tqdm, disable=True)
    try:
        yield
    finally:
        loggers.LocalLogger, trainer_base.tqdm = local_logger, tqdm


@contextmanager
def micro_batches_cut_by(cut: CutMicroBatches, data: TensorDict) -> Iterator[None]:
    """Within the block, verl's FSDP engine cuts ``data``, and no other mini-batch, with ``cut``.

    What: ``prepare_micro_batches`` and ``postprocess_batch_func`` as ``verl.workers.engine.fsdp.transformer_impl`` sees
    them look for ``cut`` in the mini-batch they are given. Where it is, they call it, and restore the order of the rows
    whatever ``use_dynamic_bsz`` says (verl assumes that a fixed micro-batch size never reorders them); other
    mini-batches go to verl's functions. Put in once per process and left there, so that engines may run inside or
    beside each other, in any order or thread.
    Why: ``FSDPEngine.forward_backward_batch`` calls the two as module functions and has no method to override;
    copying its loop would fork gradient accumulation, loss scaling and profiling.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: cutting micro-batches is a method of verl's engine.

    Args:
        cut: takes the mini-batch and the data-parallel group; returns the micro-batches and the row indices of
            each, as ``verl.workers.engine.utils.prepare_micro_batches`` does.
        data: the mini-batch; carries ``cut`` while the block runs.
    """
    from verl.utils import tensordict_utils as tu

    _look_for_cuts()
    tu.assign_non_tensor_data(data, _CUT_KEY, cut)
    try:
        yield
    finally:
        data.pop(_CUT_KEY)


_CUT_KEY = "prefix_grouper_cut"


def _look_for_cuts() -> None:
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp import transformer_impl

    prepare, postprocess = transformer_impl.prepare_micro_batches, transformer_impl.postprocess_batch_func
    if getattr(prepare, "looks_for_cuts", False):
        return

    def cut_of(data: TensorDict) -> CutMicroBatches | None:
        return tu.get_non_tensor_data(data, _CUT_KEY, default=None)

    @functools.wraps(prepare)
    def prepare_by_cut(
        data: TensorDict, dp_group: Any = None, **kwargs: Any
    ) -> tuple[list[TensorDict], list[list[int]] | None]:
        cut = cut_of(data)
        if cut is None:
            return prepare(data=data, dp_group=dp_group, **kwargs)
        return cut(data.exclude(_CUT_KEY), dp_group)

    @functools.wraps(postprocess)
    def postprocess_in_order(output_lst: list[Any], indices: Any, data: TensorDict) -> dict[str, Any]:
        if cut_of(data) is None:
            return postprocess(output_lst=output_lst, indices=indices, data=data)
        options = data.select("pad_mode", strict=False)
        tu.assign_non_tensor(options, use_dynamic_bsz=True)
        return postprocess(output_lst=output_lst, indices=indices, data=options)

    prepare_by_cut.looks_for_cuts = True  # type: ignore[attr-defined]
    transformer_impl.prepare_micro_batches = prepare_by_cut
    transformer_impl.postprocess_batch_func = postprocess_in_order


@contextmanager
def value_models_loaded_by(load: Callable[..., Any]) -> Iterator[None]:
    """Within the block, verl's FSDP engine of this process loads its value model with ``load``.

    What: ``verl.utils.model.load_valuehead_model``, which ``FSDPEngine._build_module`` imports when it is called;
    put back at the end of the block.
    Why: the function loads every value model with ``attn_implementation="flash_attention_2"``, whatever the model
    config says, and has no argument for it.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: verl loads value models with the attention of their config.

    Args:
        load: takes ``local_path``, ``torch_dtype``, ``model_config`` and ``trust_remote_code``.
    """
    import verl.utils.model as patched

    loader = patched.load_valuehead_model
    if list(inspect.signature(loader).parameters) != ["local_path", "torch_dtype", "model_config", "trust_remote_code"]:
        raise UpstreamChangedError(
            f"verl.utils.model.load_valuehead_model now takes {inspect.signature(loader)}; value models need "
            "verl>=0.9.0,<0.10"
        )
    patched.load_valuehead_model = load
    try:
        yield
    finally:
        patched.load_valuehead_model = loader


@contextmanager
def forwards_left_alone() -> Iterator[None]:
    """Within the block, verl's FSDP engine of this process builds its model without replacing forwards.

    What: ``apply_monkey_patch`` as ``verl.workers.engine.fsdp.transformer_impl`` sees it does nothing; put back at the
    end of the block.
    Why: for Qwen3.5 it puts its own forwards into transformers' classes, for all models of the process. They take no
    ``logits_to_keep`` and drop the keywords that say which rows are shared. What else the engine asks of it, Ulysses
    and fused kernels, packed mode does by other means.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: verl's forwards of Qwen3.5 hand on the keywords that they do not know.

    Raises:
        UpstreamChangedError: the function has other parameters than the block can answer for.
    """
    from verl.workers.engine.fsdp import transformer_impl

    patched = transformer_impl.apply_monkey_patch
    missing = {"model", "use_remove_padding", "ulysses_sp_size"} - inspect.signature(patched).parameters.keys()
    if missing:
        raise UpstreamChangedError(
            f"verl.models.transformers.monkey_patch.apply_monkey_patch no longer takes {', '.join(sorted(missing))}; "
            "Qwen3.5 needs verl>=0.9.0,<0.10"
        )
    transformer_impl.apply_monkey_patch = lambda **kwargs: None
    try:
        yield
    finally:
        transformer_impl.apply_monkey_patch = patched


def drop_unreduced_gradients(module: Any) -> None:
    """Forget gradients that micro-batches have left for the last one of a mini-batch to reduce.

    What: the accumulated and the unsharded gradients that FSDP2 keeps beside its parameters are dropped.
    Why: while gradients are accumulated without communication, FSDP2 holds them where ``optimizer.zero_grad`` does not
    reach; after an exception in the middle of a mini-batch they would be added to the next one.
    Versions: torch 2.11 to 2.13.
    Remove when: ``FSDPModule`` has a public way to drop them.

    Args:
        module: wrapped by FSDP2; without any of its modules nothing happens.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            for param in group.fsdp_params if group is not None else ():
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):  # gathered at least once
                    param._unsharded_param.grad = None
