"""verl's FSDP engines with shared prefixes: every prefix of a mini-batch is stored and computed once.

``forward_backward_batch`` plans a mini-batch together with the other ranks (``plan_mini_batch``) and runs each
micro-batch (``run_micro_batch``). Sharding, optimizer, checkpoints and losses are verl's.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from transformers.modeling_layers import GradientCheckpointingLayer
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.utils import postprocess_batch_func

from verl_pg_plugin import upstream
from verl_pg_plugin.architectures import keyword_issues, rope_length_limit
from verl_pg_plugin.compat import requirements
from verl_pg_plugin.config.keys import FROM_UPDATE
from verl_pg_plugin.engine.activations import PinnedCopier, checkpoint_layer, host_bytes, memory_budget_of_rank
from verl_pg_plugin.engine.batch import normalize_batch, old_log_prob_error
from verl_pg_plugin.engine.compiled_layers import compiling, decoder_layers, fix_sizes, let_flat_parameters_compile
from verl_pg_plugin.engine.heads import ForwardOutputs, LogProbHead, install_head, language_model_outputs, value_outputs
from verl_pg_plugin.engine.inputs import SequenceSelector
from verl_pg_plugin.engine.metrics import MiniBatchCosts, figures_of_rank, mini_batch_metrics, weigh_means
from verl_pg_plugin.engine.micro_batch import MiniBatch, reshard, run_micro_batch
from verl_pg_plugin.engine.plan import Plan, plan_mini_batch
from verl_pg_plugin.engine.prepare import (
    check_no_dropout,
    check_parameter_order,
    load_value_model,
    order_buffers,
    own_attention_refused,
    prepare_config,
    prepare_model,
    refuse,
    select_on_all_ranks,
)
from verl_pg_plugin.engine.ranks import gather, gather_or_raise
from verl_pg_plugin.engine.verify import Verifier
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.lm_head import lm_head_issues
from verl_pg_plugin.modalities import modality_of
from verl_pg_plugin.planning.activation_level import Level, MemoryBudget
from verl_pg_plugin.planning.activation_policy import ActivationPolicy
from verl_pg_plugin.planning.memory import TokenBytes, WeightBytes

logger = logging.getLogger(__name__)


class SharedPrefixEngine(FSDPEngine):
    """Base of both engines: packed mode with ``use_remove_padding=True``, else upstream's padded groups."""

    # Set by verl's engines; ``compat`` checks all of them.
    model_config: Any
    engine_config: Any
    module: nn.Module
    rank: int
    device_mesh: DeviceMesh
    ulysses_parallel_group: ProcessGroup | None
    ulysses_sequence_parallel_size: int
    pad_to_length: bool
    pad_to_length_bucket: int
    compute_entropy_from_logits: Callable[[torch.Tensor], torch.Tensor]
    scaler: Any
    _autocast_dtype: torch.dtype
    _is_lora: bool
    _uses_fsdp2_cpu_offload_policy: bool

    log_prob_head: LogProbHead | None = None  # None if all logits are held at once
    _logged_level = False
    _why_level = "as configured"
    _of_update: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None  # tokens and outputs, read once

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        # Before verl's checks, whose messages do not name our options.
        self.kernel, self.compiles, why = select_on_all_ranks(engine_config, model_config)
        super().__init__(model_config, engine_config, *args, **kwargs)
        self.packed = bool(model_config.use_remove_padding)
        self.modality = modality_of(model_config.hf_config)
        self.options = engine_config.prefix_grouper
        self._device = torch.device(get_device_id())
        if self.rank == 0:  # a warning, since verl's workers hide lower levels
            logger.warning("%s mode: %s", "packed" if self.packed else "prefix_grouper", why)

    def _build_module(self) -> nn.Module:
        prepare_config(self.model_config.hf_config)
        refused = own_attention_refused(self.model_config.hf_config.model_type)
        with upstream.forwards_left_alone(), refused:  # verl's own forwards drop our keyword
            module = super()._build_module()
        self._take_over(module)
        self._replace_checkpoints(module)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        self._finish_unsharded(module)
        order_buffers(module)
        with upstream.activation_offload_left_out():
            module = super()._build_fsdp_module(module)
        if self.compiles:
            let_flat_parameters_compile(module)
        return module

    def _take_over(self, module: nn.Module) -> None:
        """Install the mixers in a model built from a prepared config."""
        recomputed = self.model_config.enable_gradient_checkpointing
        self.shared_model = prepare_model(module, self.modality, compiles=self.compiles, recomputed=recomputed)
        self._layers = decoder_layers(module)
        refuse(module, [issue for layer in {*map(type, self._layers)} for issue in keyword_issues(layer)])
        model = self.shared_model
        if self.rank == 0 and model.flops.unknown:
            logger.warning("FLOPs of %s %s: tokens order micro-batches", model.name, model.flops.unknown)
        if self.rank == 0 and self.packed and self.options.prefix_cache == "auto" and not model.prefix_cache:
            logger.warning("chunks of a split group compute its prefix again: %s has no cache", model.name)

    def _replace_checkpoints(self, module: nn.Module) -> None:
        """Replace the gradient checkpoints of a model's layers by those with activation levels."""
        name, recomputes = "_gradient_checkpointing_func", self.model_config.enable_gradient_checkpointing
        layers = [layer for layer in self._layers if hasattr(layer, name)]
        if recomputes and any(isinstance(it, GradientCheckpointingLayer) for it in {*self._layers} - {*layers}):
            raise upstream.UpstreamChangedError(
                f"enable_gradient_checkpointing=True: this transformers sets no {name} in decoder layers. "
                f"Fix: pip install '{requirements('tested').get('transformers', 'transformers')}'"
            )
        if recomputes and not layers:  # transformers' own checkpoints keep inputs
            level = self.options.activations
            if level not in ("auto", Level.INPUTS.value):
                why = f"++prefix_grouper.activations={level} needs its decoder layers, which it does not name"
                refuse(module, [Issue("", why, "++prefix_grouper.activations=inputs")])
            if level == "auto":
                self._why_level = "by the model's own checkpoints"
            self.options = replace(self.options, activations=Level.INPUTS.value)
        for layer in layers:
            layer._gradient_checkpointing_func = checkpoint_layer
        self._copier = None if get_device_name() == "cpu" else PinnedCopier()

    def _finish_unsharded(self, module: nn.Module) -> None:
        """Check a model, with its adapters, before it is sharded, and count the bytes of its weights."""
        check_no_dropout(module)
        check_parameter_order(module)
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
        try:
            return TokenBytes.of(config, self._autocast_dtype.itemsize, self.compiles, lm_head)
        except Exception as error:  # a config class may hold anything, and an estimate must end no run
            if self.rank == 0:
                logger.warning("activations of %s cannot be counted: %r", self.shared_model.name, error)
            return None

    @cached_property
    def verifier(self) -> Verifier:
        layers = f"{self.shared_model.layers.total()} layers, all through packed attention"
        model = f"{layers}, attention kernel {self.kernel.name}"
        return Verifier(self.options, model, self._autocast_dtype, self.shared_model.untested)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a mini-batch in verl's no-padding format, as verl's engine does.

        Returns ``model_output``, jagged in the order of ``data`` (in updates only with ``return_model_output``),
        ``loss`` of each micro-batch, and ``metrics``. An invalid mini-batch is a ValueError, KeyError or RankError on
        every rank, a mismatch in verify mode a MismatchError or RankError. Any other error is raised on its rank alone.

        An update with ``FROM_UPDATE`` takes old log-probs from its own forward and keeps its outputs. The next forward
        with ``FROM_UPDATE`` returns them.
        """
        if from_update := tu.get_non_tensor_data(data, FROM_UPDATE, default=False):
            if forward_only:
                return {"model_output": self._take_outputs(data), "loss": [1.0], "metrics": {}}
            if self._of_update is not None:
                raise old_log_prob_error("a batch has several optimizer steps")
        plan = self.plan(data, forward_only)
        loss_scale = {"dp_size": self.get_data_parallel_size(), "batch_num_tokens": plan.loss_mask_tokens}
        tu.assign_non_tensor(plan.data, sp_size=self.ulysses_sequence_parallel_size, **loss_scale)
        returns_outputs = forward_only or tu.get_non_tensor_data(plan.data, "return_model_output", default=from_update)
        batch = self._mini_batch(plan, loss_function, forward_only)
        results = []
        for index, planned in enumerate(plan.micro_batches):
            is_last = index == len(plan.micro_batches) - 1
            grads = torch.no_grad() if forward_only else self._gradient_sync_context(is_last_micro_batch=is_last)
            with grads, torch.profiler.record_function(f"micro_batch{index}"):
                result = run_micro_batch(batch, planned)
            if not returns_outputs:
                del result["model_output"]
            results.append(result)
        self.verifier.end_mini_batch(batch.kind, batch.costs.num_verified, batch.costs.verify_max_error)
        if batch.cache.num_tokens:
            raise RuntimeError(f"the gradients of {batch.cache.num_tokens} cached tokens were never consumed")

        batch.costs.peak_cached_bytes = batch.cache.peak_bytes
        for result in results:
            result["loss"] = result["loss"].item()
        weigh_means([result["metrics"] for result in results], plan.loss_weights)
        tu.assign_non_tensor(plan.data, use_dynamic_bsz=True)  # verl restores the order only of dynamic batches
        output = postprocess_batch_func(results, [planned.sequences for planned in plan.micro_batches], plan.data)
        if from_update:
            self._of_update = plan.data["input_ids"], output["model_output"]
        figures = gather(figures_of_rank(plan, self.shared_model.flops, batch.costs))
        metrics = mini_batch_metrics(figures, self.ulysses_sequence_parallel_size, self.kernel.name)
        if "prompts" in plan.data.keys():  # noqa: SIM118 - a TensorDict iterates over its batch
            output["metrics"].update(metrics)
        else:  # verl's SFT trainer would pass lists of lists to its loggers, which reject them
            text = "shared prefixes: dedup ratio %.2f (tokens of all sequences over computed tokens)"
            logger.info(text, metrics["prefix_grouper/dedup_ratio"][0])
        return output

    def _take_outputs(self, data: TensorDict) -> dict[str, torch.Tensor]:
        """Return the outputs of the update of this batch, once."""
        tokens, outputs = self._of_update or (None, {})
        self._of_update, wanted = None, normalize_batch(data)["input_ids"]
        if tokens is None or not all(map(torch.equal, *((ids.values(), ids.offsets()) for ids in (tokens, wanted)))):
            raise old_log_prob_error("the last update had other sequences than this batch")
        return outputs

    def _mini_batch(self, plan: Plan, loss_function: Callable | None, forward_only: bool) -> MiniBatch:
        return MiniBatch(
            plan=plan,
            selector=SequenceSelector(plan.data),
            loss_function=loss_function,
            forward_only=forward_only,
            module=self.module,
            forward_outputs=self._forward_outputs,
            shared_model=self.shared_model,
            modality=self.modality,
            kernel=self.kernel,
            device=self._device,
            dtype=self._autocast_dtype,
            sp_group=self.ulysses_parallel_group,
            token_multiple=self.pad_to_length_bucket if self.pad_to_length else 1,
            verifier=self.verifier,
            dp_group=self.get_data_parallel_group(),
            copier=self._copier,
            backward=self._backward,
            costs=MiniBatchCosts(verifies=self.verifier.enabled),
        )

    def _backward(self, loss: torch.Tensor) -> None:
        with compiling() if self.compiles else nullcontext():
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    @property
    @abstractmethod
    def _forward_outputs(self) -> ForwardOutputs:
        """The function of ``engine.heads`` that calls the model."""

    def plan(self, data: TensorDict, forward_only: bool) -> Plan:
        """Plan a mini-batch together with the other ranks; see ``plan_mini_batch``."""
        plan = plan_mini_batch(
            data,
            self.modality,
            self.shared_model.flops,
            packed=self.packed,
            caches=self.packed and self.options.prefix_cache != "off" and self.shared_model.prefix_cache,
            forward_only=forward_only,
            policy=self._activation_policy(forward_only),
            fused_head=self.log_prob_head is not None and self.log_prob_head.fused is not None,
            rope_length_limit=rope_length_limit(self.model_config.hf_config),
            sp_size=self.ulysses_sequence_parallel_size,
            dp_rank=self.get_data_parallel_rank(),
        )
        if self.rank == 0 and not (forward_only or self._logged_level):
            largest = max(plan.micro_batches, key=lambda planned: planned.layout.num_tokens)
            tokens = largest.layout.num_tokens
            logger.warning("activations: %s for %d tokens (%s)", largest.level.value, tokens, plan.policy.why)
            self._logged_level = True
        return plan

    def _activation_policy(self, forward_only: bool) -> ActivationPolicy:
        """Return the activation policy of the next mini-batch, with the least memory of any rank."""
        policy = ActivationPolicy.of_settings(
            self.options.activations,
            self.model_config.enable_gradient_checkpointing,
            fixed_reason=self._why_level,
            sizes=self._token_bytes,
            offload_only=self.model_config.enable_activation_offload,
            logits_at_once=self.log_prob_head is None,
            ranks=self.ulysses_sequence_parallel_size,
        )
        if forward_only or get_device_name() != "cuda":
            return policy
        weights = self._weight_bytes
        reshard(self.module)  # weights may be gathered after a forward, and ``gathered`` counts them
        with gather_or_raise() as budgets:  # one for all ranks: the slowest sets the pace, Ulysses ranks share cuts
            budgets.append(memory_budget_of_rank(self.module, weights.gathered, weights.head, self._host_bytes))
        least = (min(getattr(budget, part) for budget in budgets) for part in ("device", "host", "reserve"))
        return replace(policy, memory=MemoryBudget(*least))

    @cached_property
    def _host_bytes(self) -> float:
        """Host bytes for this rank, measured before the first update, while the rollout engine sleeps."""
        config, weights = self.engine_config, self._weight_bytes
        if self._uses_fsdp2_cpu_offload_policy:  # weights are on the host already
            return host_bytes() - weights.gradients - weights.optimizer
        return host_bytes() - config.param_offload * weights.weights - config.optimizer_offload * weights.optimizer


class SharedPrefixLanguageModel(SharedPrefixEngine):
    """Language-model engine; returns ``log_probs``, ``entropy`` and ``sum_pi_squared`` of response tokens."""

    def _finish_unsharded(self, module: nn.Module) -> None:
        base: Any = module.get_base_model() if self._is_lora else module
        refuse(base, lm_head_issues(type(base)))
        if self.packed:  # padded groups run the head on columns that hold other tokens too
            self.log_prob_head = install_head(base, self.model_config, self.options.logits_chunk_size)
        super()._finish_unsharded(module)

    @property
    def _forward_outputs(self) -> ForwardOutputs:
        entropy = self.compute_entropy_from_logits
        return partial(language_model_outputs, head=self.log_prob_head, config=self.engine_config, entropy=entropy)


class SharedPrefixValueModel(SharedPrefixEngine):
    """Value-model engine; returns ``values`` of response tokens, by a token classifier with one label."""

    @property
    def _forward_outputs(self) -> ForwardOutputs:
        return value_outputs

    def _build_module(self) -> nn.Module:
        # verl loads value models with flash-attn only.
        with upstream.value_models_loaded_by(load_value_model):
            return super()._build_module()
