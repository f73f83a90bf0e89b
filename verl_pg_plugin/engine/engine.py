"""verl's FSDP engines with shared prefixes: every prefix of a mini-batch is stored and computed once.

``SharedPrefixEngine.forward_backward_batch`` runs a mini-batch. ``plan.plan_mini_batch`` reads it, cuts it into
micro-batches, lays each one out and agrees with the other ranks. The sequences of a micro-batch are selected on the
host and sent to the device, behind the launch of the backward before; ``inputs`` makes the model's keywords of the
layout, and ``compute`` runs the model. verl's loss and backward follow, and ``metrics`` adds up what it cost. Sharding,
optimizer, checkpoints and losses are verl's.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FSDPModule
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.utils import postprocess_batch_func

from verl_pg_plugin import upstream
from verl_pg_plugin.architectures import lm_head_issues, steady_length
from verl_pg_plugin.attention.cache import PrefixCache
from verl_pg_plugin.engine.activations import LayerCheckpoints, PinnedCopier, checkpoint_layer, host_bytes, room_of_rank
from verl_pg_plugin.engine.batch import SequenceSelector
from verl_pg_plugin.engine.compiled_layers import compiling, decoder_layers, fix_sizes
from verl_pg_plugin.engine.heads import LogProbHead, install_head, read_request
from verl_pg_plugin.engine.inputs import ModelInputs, make_context, make_inputs
from verl_pg_plugin.engine.metrics import MiniBatchCosts, figures_of_rank, mini_batch_metrics, weigh_means
from verl_pg_plugin.engine.plan import Plan, PlannedMicroBatch, plan_mini_batch
from verl_pg_plugin.engine.prepare import (
    check_no_dropout,
    choose_alike,
    load_value_model,
    prepare_config,
    prepare_model,
    refuse,
)
from verl_pg_plugin.engine.ranks import agreement, gather
from verl_pg_plugin.engine.verify import Responses, Verifier, read_responses, rounding_noise
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.layout import Layout, Sequences
from verl_pg_plugin.modalities import Kind, modality_of
from verl_pg_plugin.planning.activation_level import Level, Levels, Room
from verl_pg_plugin.planning.memory import TokenBytes, WeightBytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _MiniBatch:
    """What its micro-batches have in common."""

    plan: Plan
    selector: SequenceSelector
    cache: PrefixCache
    costs: MiniBatchCosts
    loss_function: Callable | None
    forward_only: bool


class SharedPrefixEngine(FSDPEngine):
    """What both engines have in common: packed mode with ``use_remove_padding=True``, else upstream's padded groups."""

    log_prob_head: LogProbHead | None = None  # None where all logits are held at once
    _told_level = False
    _why_asked = "as asked"

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        # First: a setting is refused in our words, not in verl's.
        self.kernel, self.compiles, why = choose_alike(engine_config, model_config)
        super().__init__(model_config, engine_config, *args, **kwargs)
        self.packed = bool(model_config.use_remove_padding)
        self.modality = modality_of(model_config.hf_config)
        self.options = engine_config.prefix_grouper
        self._device = torch.device(get_device_id())
        if self.rank == 0:  # a warning, because verl's workers hide all below and this decides a run's speed
            logger.warning("%s mode: %s", "packed" if self.packed else "prefix_grouper", why)

    def _build_module(self) -> nn.Module:
        prepare_config(self.model_config.hf_config, self.modality)
        with upstream.forwards_left_alone():  # verl's own forwards drop keywords, ours among them
            module = super()._build_module()
        self._take_over(module)
        self._replace_checkpoints(module)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        self._finish_unsharded(module)
        with upstream.activation_offload_left_out():
            module = super()._build_fsdp_module(module)
        if self.compiles:
            upstream.let_flat_parameters_compile(module)
        return module

    def _take_over(self, module: nn.Module) -> None:
        """Let a model built from a prepared config run over shared prefixes."""
        recomputed = self.model_config.enable_gradient_checkpointing
        self.shared_model = prepare_model(module, self.modality, compiles=self.compiles, recomputed=recomputed)
        self._layers = decoder_layers(module)
        if self.rank == 0 and self.packed and self.options.carry == "auto" and not self.shared_model.prefix_cache:
            logger.warning("chunks of a split group compute its prefix again: %s has no cache", self.shared_model.name)

    def _replace_checkpoints(self, module: nn.Module) -> None:
        """Let activation levels stand in for the checkpoints of a model that has them."""
        layers = [layer for layer in self._layers if getattr(layer, "_gradient_checkpointing_func", None)]
        if self.model_config.enable_gradient_checkpointing and not layers:
            asked = self.options.activations  # transformers' own checkpoints keep inputs
            if asked not in ("auto", Level.INPUTS.value):
                why = f"it does not say which modules are its decoder layers, for ++prefix_grouper.activations={asked}"
                refuse(module, [Issue("", why, "++prefix_grouper.activations=inputs")])
            if asked == "auto":
                self._why_asked = "by the model's own checkpoints"
            self.options = replace(self.options, activations=Level.INPUTS.value)
        for layer in layers:
            layer._gradient_checkpointing_func = checkpoint_layer
        self._copier = None if get_device_name() == "cpu" else PinnedCopier()

    def _finish_unsharded(self, module: nn.Module) -> None:
        """The last look at a model, adapters and all, before it is sharded."""
        check_no_dropout(module)
        for layer in self._layers if self.compiles else ():
            fix_sizes(layer)
        self._weight_bytes = WeightBytes.of(
            module,
            self.device_mesh.shape[-1],
            0 if self.log_prob_head is None else self.options.logits_chunk_size,
            keeps_weights=not getattr(self.engine_config, "reshard_after_forward", True),  # VeOmni always reshards
            keeps_gradients=self.engine_config.use_no_sync_for_gradient_accumulation,
        )

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        config = self.model_config.hf_config.get_text_config()
        lm_head = self.model_config.model_type == "language_model"
        return TokenBytes.of(config, self._autocast_dtype.itemsize, self.compiles, lm_head)

    @cached_property
    def verifier(self) -> Verifier:
        layers = f"{self.shared_model.layers.total()} layers, all through packed attention"
        return Verifier(self.options, f"{layers}, attention kernel {self.kernel.name}", self._autocast_dtype)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a mini-batch in verl's no-padding format, as verl's engine does.

        Returns ``model_output`` jagged and in the order of ``data`` (of updates only where ``return_model_output``
        asks), ``loss`` of each micro-batch, and ``metrics``. What is wrong with a mini-batch is a ValueError (a field
        that it lacks a KeyError) or RankError on every rank; what else fails, as verify mode by MismatchError, fails on
        its rank alone.
        """
        plan = self.plan(data, forward_only)
        of_losses = {"dp_size": self.get_data_parallel_size(), "batch_num_tokens": plan.loss_mask_tokens}
        tu.assign_non_tensor(plan.data, sp_size=self.ulysses_sequence_parallel_size, **of_losses)
        returns_outputs = forward_only or tu.get_non_tensor_data(plan.data, "return_model_output", default=False)
        cache = PrefixCache()
        costs = MiniBatchCosts(verifies=self.options.verify != "off")
        batch = _MiniBatch(plan, SequenceSelector(plan.data), cache, costs, loss_function, forward_only)
        results = []
        for index, planned in enumerate(plan.micro_batches):
            is_last = index == len(plan.micro_batches) - 1
            grads = torch.no_grad() if forward_only else self._gradient_sync_context(is_last_micro_batch=is_last)
            with grads, torch.profiler.record_function(f"micro_batch{index}"):
                result = self._run(batch, planned)
            if not returns_outputs:
                del result["model_output"]
            results.append(result)
        if cache.num_tokens:
            raise RuntimeError(f"the gradients of {cache.num_tokens} cached tokens were never consumed")

        costs.peak_cached_bytes = cache.peak_bytes
        for result in results:
            result["loss"] = result["loss"].item()
        weigh_means([result["metrics"] for result in results], plan.loss_weights)
        tu.assign_non_tensor(plan.data, use_dynamic_bsz=True)  # verl restores the order of dynamic batches alone
        output = postprocess_batch_func(results, [planned.sequences for planned in plan.micro_batches], plan.data)
        figures = gather(figures_of_rank(plan, self.shared_model.flops, costs))
        metrics = mini_batch_metrics(figures, self.ulysses_sequence_parallel_size, self.kernel.name)
        if "prompts" in plan.data.keys():  # noqa: SIM118 - a TensorDict iterates over its batch
            output["metrics"].update(metrics)
        else:  # verl's SFT trainer hands metrics to its loggers as lists of lists, which these do not take
            logger.info("shared prefixes: dedup ratio %.2f", metrics["prefix_grouper/dedup_ratio"][0])
        return output

    def plan(self, data: TensorDict, forward_only: bool) -> Plan:
        """Plan a mini-batch, together with the other ranks; see ``plan_mini_batch``."""
        plan = plan_mini_batch(
            data,
            self.modality,
            self.shared_model.flops,
            packed=self.packed,
            carries=self.packed and self.options.carry != "never" and self.shared_model.prefix_cache,
            forward_only=forward_only,
            levels=self._levels(forward_only),
            fused_head=self.log_prob_head is not None and self.log_prob_head.fused is not None,
            steady_length=steady_length(self.model_config.hf_config),
            sp_size=self.ulysses_sequence_parallel_size,
            dp_rank=self.get_data_parallel_rank(),
        )
        if self.rank == 0 and not (forward_only or self._told_level):
            largest = max(plan.micro_batches, key=lambda planned: planned.layout.num_tokens)
            tokens = largest.layout.num_tokens
            logger.warning("activations: %s for %d tokens (%s)", largest.level.value, tokens, plan.levels.why)
            self._told_level = True
        return plan

    def _levels(self, forward_only: bool) -> Levels:
        """How the micro-batches of the next mini-batch get their activation level."""
        levels = Levels.of_settings(
            self.options.activations,
            self.model_config.enable_gradient_checkpointing,
            why_asked=self._why_asked,
            sizes=self._token_bytes,
            host_alone=self.model_config.enable_activation_offload,
            logits_at_once=self.log_prob_head is None,
            ranks=self.ulysses_sequence_parallel_size,
        )
        if forward_only or get_device_name() != "cuda":
            return levels
        weights = self._weight_bytes
        for part in self.module.modules():
            if isinstance(part, FSDPModule):  # may be whole behind a forward alone, and is counted in ``gathered``
                part.reshard()
        with agreement() as rooms:  # the slowest rank sets the pace, and under Ulysses all must cut alike
            rooms.append(room_of_rank(self.module, weights.gathered, weights.head, self._host_bytes))
        least = (min(getattr(room, part) for room in rooms) for part in ("device", "host", "reserve"))
        return replace(levels, room=Room(*least))

    @cached_property
    def _host_bytes(self) -> float:
        """For this rank, measured in front of the first update, when the rollout engine is there and sleeps."""
        config, weights = self.engine_config, self._weight_bytes
        if getattr(self, "_uses_fsdp2_cpu_offload_policy", False):  # weights are there by now, and not the rest
            return host_bytes() - weights.gradients - weights.optimizer
        return host_bytes() - config.param_offload * weights.weights - config.optimizer_offload * weights.optimizer

    def _run(self, batch: _MiniBatch, planned: PlannedMicroBatch) -> dict[str, Any]:
        """One micro-batch, its backward included; returns ``model_output``, ``loss`` and ``metrics``."""
        loss_function, forward_only, costs = batch.loss_function, batch.forward_only, batch.costs
        kind = "forward-only" if forward_only else "update"
        sequences = batch.plan.sequences.select(planned.sequences)
        micro_batch = batch.selector.take(planned.sequences, self._device)
        # A chunk of an update takes from the cache what it computes itself; what it reads is there, or is prefilled.
        # All forwards without gradient come first: FSDP2 expects a forward's backward to come next.
        consumed = [] if forward_only else batch.cache.consume(planned.layout)
        self._prefill(batch, planned)
        samples = self.verifier.choose(planned, sequences, kind)
        chosen = [planned.sequences[sample] for sample in samples]
        alone = self._compute_alone(batch, chosen) if chosen else None
        access = batch.cache.access(planned.layout, publishes=forward_only, consumed=consumed)
        checkpoint = None if planned.level is Level.ALL else LayerCheckpoints(planned.level, self._copier).run
        inputs = self._inputs(planned.layout, sequences, batch.plan.shown, cache=access, checkpoint=checkpoint)
        loss, metrics = torch.ones((), device=self._device), {}  # filled: a copy of a number would wait for the device
        with self._autocast():
            outputs = self.compute(inputs, micro_batch, loss_function)
            if loss_function is not None:
                group = self.get_data_parallel_group()
                loss, metrics = loss_function(model_output=outputs, data=micro_batch, dp_group=group)
        if not forward_only:
            with compiling() if self.compiles else nullcontext():
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()

        outputs = {name: values.detach() for name, values in outputs.items()}
        if alone is not None:
            got = read_responses(outputs, samples, sequences.prompt_lengths)
            costs.num_verified += len(samples)
            max_error = self.verifier.check(got, *alone, planned, samples, micro_batch, kind)
            costs.verify_max_error = max(costs.verify_max_error, max_error)
        costs.num_padding += inputs.num_padding
        return {"model_output": outputs, "loss": loss.detach(), "metrics": metrics}

    def compute(
        self, inputs: ModelInputs, micro_batch: TensorDict, loss_function: Callable | None
    ) -> dict[str, torch.Tensor]:
        """One forward of the model: named outputs of every sequence, jagged (B, length) as verl's losses read them."""
        names, columns_NC = self._forward_outputs(inputs, micro_batch, loss_function)
        self.shared_model.check_every_layer_mixed(inputs.context)
        values_CL, offsets = inputs.on_sequences(columns_NC), micro_batch["input_ids"].offsets()
        return {name: torch.nested.nested_tensor_from_jagged(values_CL[i], offsets) for i, name in enumerate(names)}

    @abstractmethod
    def _forward_outputs(
        self, inputs: ModelInputs, micro_batch: TensorDict, loss_function: Callable | None
    ) -> tuple[list[str], torch.Tensor]:
        """Call the model; names of C outputs, and (N, C) of them for the labels of this rank."""

    def _prefill(self, batch: _MiniBatch, planned: PlannedMicroBatch) -> None:
        """Compute without gradient what a chunk reads and no earlier one has published, if there is any."""
        if (layout := planned.prefill) is None:
            return
        first = planned.sequences[:1]  # the path is a prefix of a chunk's first sequence
        access = batch.cache.access(layout, publishes=True, prefill=True)
        inputs = self._inputs(layout, batch.plan.sequences.select(first), batch.plan.shown, cache=access)
        training = self.module.training
        self.module.eval()  # for the graphs that compiled layers have of old_log_prob; dropout is refused
        try:
            with torch.no_grad(), self._autocast():
                self.compute(inputs, batch.selector.take(first, self._device), batch.loss_function)
        finally:
            self.module.train(training)

    def _compute_alone(self, batch: _MiniBatch, chosen: list[int]) -> tuple[Responses, Responses]:
        """Some samples with nothing shared, and the same with rounding noise where that gives the tolerance."""
        micro_batch = batch.selector.take(chosen, self._device)
        sequences = batch.plan.sequences.select(chosen)
        layout = sequences.unshared().build_layout()

        def responses(noise: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Responses:
            inputs = self._inputs(layout, sequences, batch.plan.shown, perturb=noise)
            with torch.no_grad(), self._autocast():
                outputs = self.compute(inputs, micro_batch, batch.loss_function)
            return read_responses(outputs, list(range(len(chosen))), sequences.prompt_lengths)

        alone = responses()
        return alone, alone if self.options.verify_tolerance is not None else responses(rounding_noise())

    def _inputs(self, layout: Layout, sequences: Sequences, shown: frozenset[Kind], **of_context: Any) -> ModelInputs:
        """Make the context of a forward and the model's inputs around it."""
        context = make_context(layout, self.kernel, self._device, self.ulysses_parallel_group, **of_context)
        multiple = self.pad_to_length_bucket if self.pad_to_length else 1
        return make_inputs(
            context, layout, sequences, self.modality, self._device, shown=shown, token_multiple=multiple
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._autocast_dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(get_device_name(), dtype)


class SharedPrefixLanguageModel(SharedPrefixEngine):
    """Language-model engine: ``log_probs``, ``entropy`` and ``sum_pi_squared`` of the tokens in front of responses."""

    def _finish_unsharded(self, module: nn.Module) -> None:
        base: Any = module.get_base_model() if self._is_lora else module
        refuse(base, lm_head_issues(type(base)))
        if self.packed:  # a head with a request takes the tokens it is given, and columns of padded groups hold others
            self.log_prob_head = install_head(base, self.model_config, self.options.logits_chunk_size)
        super()._finish_unsharded(module)

    def _forward_outputs(
        self, inputs: ModelInputs, micro_batch: TensorDict, loss_function: Callable | None
    ) -> tuple[list[str], torch.Tensor]:
        entropy = self.compute_entropy_from_logits
        request = read_request(micro_batch, inputs, loss_function, self.engine_config, entropy)
        head = self.log_prob_head if self.log_prob_head and self.log_prob_head.takes(request) else None
        # transformers hands the keyword ``prefix_grouper`` through every layer, to ``attention.interface`` or
        # ``mixers.delta_layer``, which mix tokens in its place.
        with nullcontext() if head is None else head.computing(request):
            logits = self.module(**inputs.keywords, logits_to_keep=inputs.head_columns).logits
        found_NC = inputs.at_labels(logits)
        if head is None:
            return request.names, request.outputs(found_NC)
        if found_NC.shape[-1] != len(request.names):
            raise RuntimeError(
                "the model's logits are not what its head returned; set ++prefix_grouper.logits_chunk_size=0 and "
                "actor_rollout_ref.model.use_fused_kernels=False"
            )
        return request.names, found_NC


class SharedPrefixValueModel(SharedPrefixEngine):
    """Value-model engine: ``values`` of the tokens in front of responses, by a token classifier with one label."""

    def _build_module(self) -> nn.Module:
        # verl loads value models for flash-attn only, which shared prefixes cannot use.
        with upstream.value_models_loaded_by(load_value_model):
            return super()._build_module()

    def _forward_outputs(
        self, inputs: ModelInputs, micro_batch: TensorDict, loss_function: Callable | None
    ) -> tuple[list[str], torch.Tensor]:
        values_GS1 = self.module(**inputs.keywords).logits
        return ["values"], inputs.at_labels(values_GS1.index_select(1, inputs.head_columns))
