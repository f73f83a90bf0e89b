"""What verl's FSDP engines with shared prefixes have in common; without the mode they are the stock engines.

Of ``verl.workers.engine.fsdp.transformer_impl`` this overrides how the model is built, the loop over micro-batches
(``forward_backward_batch``, ``forward_step``) and, in its bases, what goes into the model and comes out
(``model_passes``). At ``optimizer_step``, ``train_batch`` and ``infer_batch`` it only looks on. Sharding, optimizer,
checkpoints and losses are verl's.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FSDPModule
from verl.utils.device import get_device_id, get_device_name

from verl_pg_plugin import upstream
from verl_pg_plugin.architectures.stock_faults import rmpad_fault
from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.config.in_force import assert_in_force
from verl_pg_plugin.config.layer_compiler import Decision
from verl_pg_plugin.engine.activation_budget import Held
from verl_pg_plugin.engine.batch.device_copy import on_device
from verl_pg_plugin.engine.batch.lazy_micro_batches import LazyMicroBatches
from verl_pg_plugin.engine.batch.micro_batch_plan import CarryPolicy, MicroBatchPlan, plan_micro_batches
from verl_pg_plugin.engine.batch.plan_metrics import figures_of_rank, flops_of_a_device, plan_metrics
from verl_pg_plugin.engine.batch.row_selection import with_ragged_tokens, without_gaps
from verl_pg_plugin.engine.compiled_layers import compiling
from verl_pg_plugin.engine.local_choices import choose_alike
from verl_pg_plugin.engine.mfu_clock import MfuClock, MfuOfPasses
from verl_pg_plugin.engine.model_passes import ModelPasses
from verl_pg_plugin.engine.plan_policy import PlanPolicy
from verl_pg_plugin.engine.ranks import on_every_rank
from verl_pg_plugin.engine.requirements import check_batch, check_no_dropout, check_options
from verl_pg_plugin.engine.shared_model import prepare_config, prepare_model
from verl_pg_plugin.engine.sharing_modes import PackedMode, PaddedGroupsMode, SharingMode
from verl_pg_plugin.engine.steps.carry import Carrier
from verl_pg_plugin.engine.steps.keep import Keeper
from verl_pg_plugin.engine.steps.meetings import Meetings
from verl_pg_plugin.engine.steps.verify import Verifier
from verl_pg_plugin.engine.unpatched_forward import unpatched_forward
from verl_pg_plugin.modalities import Modality, modality_of

logger = logging.getLogger(__name__)


class SharedPrefixMixin(ModelPasses, PlanPolicy, MfuOfPasses):
    """Put in front of one of verl's FSDP engines.

    Prefixes are shared when the engine config is a ``PrefixGrouperEngineConfig`` with ``use_prefix_grouper=True``:
    in packed rows if the model config has ``use_remove_padding=True``, else in upstream's padded groups.

    Attributes:
        sharing: the mode, or None for the stock engine.
        shared_model: the model as the mode runs it, once it is built.
        layer_compilation: whether its layers are compiled, and why.
        verifier: checks live micro-batches; None where nothing is verified.
        carrier: hands rows from micro-batch to micro-batch, while a mini-batch runs.
        meetings: where ranks learn of each other's errors, while a mini-batch runs.
        keeper: says which layers an update keeps; None where every layer is recomputed.

    Raises:
        ValueError: an option that the mode does not support, or a model it cannot run.
        RuntimeError: verl's registry holds another engine, the attention kernel is missing, or ranks would run
            different ones or compile on some alone.
    """

    module: nn.Module
    layer_compilation: Decision
    rank: int
    ulysses_parallel_group: dist.ProcessGroup | None
    get_data_parallel_group: Callable[[], Any]
    optimizer_zero_grad: Callable[[], None]

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        asked = getattr(engine_config, "use_prefix_grouper", False)
        if asked:  # first, so that a setting is refused in the words of the validators and not in verl's
            on_every_rank(partial(check_options, engine_config, model_config), dist.group.WORLD)
        super().__init__(model_config, engine_config, *args, **kwargs)  # type: ignore[call-arg]
        self.sharing: SharingMode | None = None
        self.verifier: Verifier | None = None
        self.carrier: Carrier | None = None
        self.meetings: Meetings | None = None
        self.keeper: Keeper | None = None
        if not asked:
            fault = rmpad_fault(self.model_config.hf_config, get_device_name())
            if self.model_config.use_remove_padding and fault and self.rank == 0:
                logger.warning("%s; %s", fault.why, fault.fix)
            return
        in_force = partial(assert_in_force, self.engine_config.strategy, self.model_config.model_type)
        on_every_rank(in_force, dist.group.WORLD)
        choices = choose_alike(self.engine_config, self.model_config, dist.group.WORLD)
        self.layer_compilation = choices.layer_compilation
        modality = modality_of(self.model_config.hf_config)
        if self.model_config.use_remove_padding:
            self.sharing = self._packed_mode(choices.kernel, modality)
        else:
            self.sharing = PaddedGroupsMode(kernel=choices.kernel, modality=modality)
        if self.rank == 0:
            choices.log(self.sharing.name)

    def _packed_mode(self, kernel: VarlenKernel, modality: Modality) -> PackedMode:
        config = self.engine_config
        return PackedMode(
            kernel=kernel,
            modality=modality,
            row_multiple=config.pad_to_length_bucket if config.pad_to_length else 1,
            static_rows=config.prefix_grouper.static_rows,
            sp_group=self.ulysses_parallel_group,
        )

    def _build_module(self) -> nn.Module:
        if self.sharing is None:
            return super()._build_module()  # type: ignore[misc]
        prepare_config(self.model_config.hf_config, self.sharing.modality)
        with unpatched_forward(self, self.sharing.modality):
            module: Any = super()._build_module()  # type: ignore[misc]
        options = replace(self.engine_config.prefix_grouper, compile_layers=self.layer_compilation.on)
        self.shared_model = prepare_model(module, self.sharing, options)
        if options.compile_layers and not options.static_rows:
            self.sharing = replace(self.sharing, kernel=self.sharing.kernel.for_compiled_layers())
        if (saved := self.shared_model.saved_attention) is not None:
            self.sharing = replace(self.sharing, kernel=replace(self.sharing.kernel, around=saved.kernel))
        self.keeper = Keeper.of(self.shared_model, self.sharing, self.engine_config, self.model_config)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        if self.sharing is not None:
            check_no_dropout(module)
        module = super()._build_fsdp_module(module)  # type: ignore[misc]
        if self.sharing is None or self.engine_config.prefix_grouper.verify == "off":
            return module
        self.verifier = Verifier(
            options=self.engine_config.prefix_grouper,
            mode=self.sharing,
            num_layers=self.shared_model.num_layers,
            dtype=self._autocast_dtype,
            attending_with=self._attending_with,
        )
        return module

    @contextmanager
    def _attending_with(self, kernel: VarlenKernel) -> Iterator[None]:
        mode = self.sharing
        assert mode is not None
        self.sharing = replace(mode, kernel=kernel)
        try:
            yield
        finally:
            self.sharing = mode

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        stock = super().forward_step  # type: ignore[misc]
        if self.sharing is None:
            return stock(micro_batch, loss_function, forward_only)
        keeps = stock if self.keeper is None else partial(self.keeper.forward_step, stock)

        def step(
            micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool
        ) -> tuple[torch.Tensor, dict[str, Any]]:
            return keeps(on_device(micro_batch, torch.device(get_device_id())), loss_function, forward_only)

        meetings = Meetings(dist.group.WORLD) if self.meetings is None else self.meetings
        run = step if self.verifier is None else partial(self.verifier.forward_step, step, meetings)
        if self.carrier is None:
            return run(micro_batch, loss_function, forward_only)
        result = self.carrier.forward_step(step, run, micro_batch, loss_function, forward_only)
        if not forward_only:
            meetings.before_collectives()
        return result

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()  # type: ignore[misc]
        if self.keeper is not None and math.isfinite(norm):
            self.keeper.budget.stepped = True  # and the optimizer has its states
        return norm

    def _check_batch(self, data: TensorDict) -> None:
        assert self.sharing is not None
        check_batch(data)
        self.sharing.check_batch(data)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        stock = super().forward_backward_batch  # type: ignore[misc]
        if self.sharing is None:
            return stock(data, loss_function, forward_only=forward_only)
        run = partial(self._run, stock, data, loss_function, forward_only)
        if self.keeper is None or forward_only:
            return run()
        clean = all(parameter.grad is None for parameter in self.module.parameters())
        alone = dist.get_world_size() == 1 and isinstance(self.module, FSDPModule)
        return self.keeper.run(run, self.optimizer_zero_grad if alone and clean else None)

    def _run(
        self, stock: Callable[..., dict[str, Any]], data: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> dict[str, Any]:
        """A mini-batch over shared rows, with ``stock`` as verl's loop over micro-batches."""
        mode, everyone = self.sharing, dist.group.WORLD
        assert mode is not None

        def checked() -> tuple[TensorDict, CarryPolicy | None]:
            whole = without_gaps(with_ragged_tokens(data))
            self._check_batch(whole)
            return whole, self._carry_policy(forward_only)

        data, carry = on_every_rank(checked, everyone)
        plans: list[MicroBatchPlan] = []

        def cut(data: TensorDict, dp_group: Any) -> tuple[LazyMicroBatches, list[list[int]]]:
            sp_size = self.ulysses_sequence_parallel_size
            plan = plan_micro_batches(data, dp_group, sp_size, mode, self.min_dedup_ratio, carry, price=self._price)
            plans.append(plan)
            # verl's loop comes to the next micro-batch right behind the backward of the one before.
            return replace(plan.micro_batches, on_arrival=meetings.after_collectives), plan.indices

        clock = MfuClock()
        keeper = None if forward_only else self.keeper
        carrier = Carrier(self.module, self.shared_model.saved_attention, eager_exports=mode.static_rows)
        meetings = Meetings(everyone)
        outer, (self.carrier, self.meetings) = (self.carrier, self.meetings), (carrier, meetings)

        def finished() -> tuple[dict[str, float], Held | None]:
            carrier.check_all_claimed()
            padding = sum(map(mode.num_padding_rows, plans[0].layouts, plans[0].micro_batches))
            flops, carried_bytes = self.shared_model.flops, carrier.stack.peak_bytes
            patches = list(map(mode.modality.patches, plans[0].layouts, plans[0].micro_batches))
            figures = figures_of_rank(plans[0], padding, carried_bytes, flops, forward_only, patches)
            return figures, None if keeper is None else keeper.held()

        def metrics_of(ranks: list[tuple[dict[str, float], Held | None]]) -> dict[str, list[float]]:
            metrics = plan_metrics([figures for figures, _ in ranks], self.ulysses_sequence_parallel_size)
            if keeper is not None:
                metrics |= keeper.learn([held for _, held in ranks if held is not None])
            if self.verifier is not None:
                metrics |= self.verifier.take_metrics()
            return {**metrics, f"prefix_grouper/attention_backend/{mode.kernel.name}": [1.0]}

        compiler = compiling() if self.layer_compilation.on else nullcontext()
        counting = nullcontext() if self.verifier is None else self.verifier.counting()
        cutting = upstream.micro_batches_cut_by(cut, data)
        try:
            if keeper is not None:
                keeper.start(meetings)
            with counting:
                with compiler, cutting, meetings.telling():
                    output = stock(data, loss_function, forward_only=forward_only)
                ranks = meetings.gather(finished)
                output["metrics"].update(on_every_rank(partial(metrics_of, ranks), everyone))
            clock.stop(flops_of_a_device([figures for figures, _ in ranks], self.ulysses_sequence_parallel_size))
            self.clock = clock
        except BaseException:
            # Gradients of the micro-batches before the one that failed; of several ranks, some may still be in it.
            forget = upstream.forget_failed_pass if dist.get_world_size() == 1 else upstream.drop_unreduced_gradients
            forget(self.module)
            if self.model_config.enable_activation_offload:
                upstream.forget_offloaded_activations(self.module)  # of a forward without a backward
            raise
        finally:
            self.carrier, self.meetings = outer  # with ours go the rows of a chain that an error has cut short
            if self.shared_model.saved_attention is not None:
                self.shared_model.saved_attention.running = None  # the layer that an error has ended
        return output
