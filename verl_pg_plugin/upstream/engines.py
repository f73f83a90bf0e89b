"""What verl's FSDP engines call: micro-batches, loaders of models, and what a failed mini-batch leaves behind."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict

from verl_pg_plugin.upstream.changed import UpstreamChangedError

CutMicroBatches = Callable[[TensorDict, Any], tuple[Iterable[TensorDict], list[list[int]]]]


@contextmanager
def micro_batches_cut_by(cut: CutMicroBatches, data: TensorDict) -> Iterator[None]:
    """Within the block, verl's FSDP engine cuts ``data``, and no other mini-batch, with ``cut``.

    What: ``prepare_micro_batches`` and ``postprocess_batch_func`` as ``verl.workers.engine.fsdp.transformer_impl`` sees
    them look for ``cut`` in the mini-batch they are given. Where it is, the first calls it; the second restores the
    order of the rows whatever ``use_dynamic_bsz`` says (verl assumes that a fixed micro-batch size never reorders
    them). Other mini-batches go to verl's functions. Put in once per process and left there, so that engines may run
    inside or beside each other, in any order or thread.
    Why: ``FSDPEngine.forward_backward_batch`` calls the two as module functions and has no method to override;
    copying its loop would fork gradient accumulation, loss scaling and profiling.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: cutting micro-batches is a method of verl's engine.

    Args:
        cut: takes the mini-batch and the data-parallel group; returns the micro-batches, which verl counts and loops
            over once, and the row indices of each, as ``verl.workers.engine.utils.prepare_micro_batches`` does.
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
    ) -> tuple[Iterable[TensorDict], list[list[int]] | None]:
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
    # In this order: another thread goes on as soon as it sees the second.
    transformer_impl.postprocess_batch_func = postprocess_in_order
    transformer_impl.prepare_micro_batches = prepare_by_cut


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


def forget_failed_pass(module: Any) -> None:
    """Let the next pass begin as if the one that an exception has ended had never been; for a run of one rank.

    What: FSDP2's trackers of a forward and its backward begin anew, and gradients that it holds are dropped.
    Why: an exception inside of a backward leaves FSDP2 waiting for the end of that backward, so that the ends of later
    ones are never seen: their gradients are added up over all passes, whatever ``optimizer.zero_grad`` does. torch 2.13
    has ``FSDPModule.reset_iter_state`` for that; before it, what FSDP2 does at the end of a backward is called.
    Versions: torch 2.11 to 2.13.
    Remove when: torch 2.13 is the oldest that is supported, or FSDP2 begins anew by itself.

    Args:
        module: what verl's engine trains; nothing happens unless FSDP2 wraps it.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return
    state = module._get_fsdp_state()
    if state._is_root is None:
        return  # no forward has run yet; torch 2.13 would fail to reset what is not there
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    elif state._state_ctx.post_backward_final_callback_queued:
        state._root_post_backward_final_callback()
    drop_unreduced_gradients(module)


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


def forget_offloaded_activations(module: Any) -> None:
    """Forget activations that a forward has offloaded whose backward never came.

    What: the handler that verl's layers share begins anew, with no group of activations on either device.
    Why: ``enable_activation_offload`` numbers groups upwards in a forward and downwards in its backward. After an
    exception between the two it would hold those activations, and run out of groups in the next forward (KeyError).
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: ``verl.utils.activation_offload`` begins anew by itself.

    Args:
        module: what verl's engine trains with ``enable_activation_offload``.
    """
    from verl.utils.activation_offload import ActivationHandler

    forwards = (vars(part)["forward"] for part in module.modules() if "forward" in vars(part))
    methods = filter(inspect.ismethod, forwards)  # others put functions and partials there
    handlers = (inspect.getclosurevars(method).nonlocals.get("handler") for method in methods)
    handler = next((handler for handler in handlers if isinstance(handler, ActivationHandler)), None)
    if handler is None:
        return
    context = handler._offload_ctx
    if context.inside_context:  # the exception came from inside a layer
        context.__exit__(None, None, None)
    context.offload_handler.groupid_reset()
    context.offload_handler.tensor_tag_to_buf.clear()
    context.offload_handler.group_offload_mapping.clear()
    context.offload_handler.offloaded_group_count = 0
