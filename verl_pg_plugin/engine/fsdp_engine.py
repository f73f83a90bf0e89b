"""verl's FSDP engines with packed mode; with the mode off they are the stock engines.

Three seams of ``verl.workers.engine.fsdp.transformer_impl`` are overridden: model inputs, model outputs, and how
a mini-batch is cut into micro-batches. Model building, sharding, optimizer, checkpoints and losses are verl's.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.flops_counter import get_device_flops
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_pg_plugin import upstream
from verl_pg_plugin.attention import ATTENTION_NAME, register_attention, select_kernel
from verl_pg_plugin.engine.flops import ModelFlops
from verl_pg_plugin.engine.lm_head import ChunkedHead, HeadJob
from verl_pg_plugin.engine.micro_batch_plan import LAYOUT_KEY, MicroBatchPlan, layout_of, plan_micro_batches
from verl_pg_plugin.engine.packed_forward import PackedForward
from verl_pg_plugin.engine.ranks import over_ranks
from verl_pg_plugin.engine.requirements import check_model, check_options
from verl_pg_plugin.engine.sequences import read_sequences
from verl_pg_plugin.layout import PackedLayout

logger = logging.getLogger(__name__)


class PrefixGrouperFSDPEngineWithLMHead(FSDPEngineWithLMHead):
    """Language-model engine: ``log_probs``, ``entropy`` and ``sum_pi_squared`` of packed rows.

    Packed mode is on when the engine config is a ``PrefixGrouperEngineConfig`` with ``use_prefix_grouper=True``
    and the model config has ``use_remove_padding=True``.

    Raises:
        ValueError: an option that packed mode does not support, or a model it cannot run.
        RuntimeError: the attention kernel is missing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packed = bool(getattr(self.engine_config, "use_prefix_grouper", False))
        if not self.packed:
            return
        check_options(self.engine_config, self.model_config)
        self.kernel = select_kernel(self.engine_config.attention_kernel, get_device_name())
        if self.rank == 0:
            logger.info("packed mode: attention kernel %s (%s)", self.kernel.name, self.kernel.reason)

    def _build_module(self) -> nn.Module:
        if not self.packed:
            return super()._build_module()
        register_attention()
        self.model_config.hf_config._attn_implementation = ATTENTION_NAME
        module = super()._build_module()
        check_model(module)
        self.num_attention_layers = module.config.get_text_config().num_hidden_layers
        self.model_flops = ModelFlops.of(module)
        self.chunked_head = ChunkedHead.install(module, self.engine_config.logits_chunk_size)
        return module

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        if not self.packed:
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        plans: list[MicroBatchPlan] = []

        def cut(data: TensorDict, dp_group: Any) -> tuple[list[TensorDict], list[list[int]]]:
            plans.append(plan_micro_batches(data, dp_group, self.ulysses_sequence_parallel_size))
            return plans[0].micro_batches, plans[0].indices

        start = time.perf_counter()
        with upstream.micro_batches_cut_by(cut):
            output = super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        output["metrics"].update(self._plan_metrics(plans[0], time.perf_counter() - start, forward_only))
        return output

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        if not self.packed:
            return super().prepare_model_inputs(micro_batch)
        layout = tu.get_non_tensor_data(micro_batch, LAYOUT_KEY, default=None)
        if layout is None:
            sequences = read_sequences(micro_batch)
            layout = layout_of(sequences, list(range(len(sequences.prompt_lengths))))
        device = micro_batch["input_ids"].device
        forward = PackedForward.from_layout(layout, self.kernel, device)
        job = self._head_job(forward, layout, micro_batch)
        chunked = self.chunked_head is not None and self.chunked_head.takes(job)
        return {**forward.model_inputs(), "logits_to_keep": forward.head_rows}, (forward, job, chunked)

    def _head_job(self, forward: PackedForward, layout: PackedLayout, micro_batch: TensorDict) -> HeadJob:
        temperature, rows = micro_batch["temperature"], None
        if isinstance(temperature, torch.Tensor):
            head_sequence = torch.from_numpy(layout.head_sequence).to(forward.labels.device)
            rows = temperature.to(torch.float32).reshape(-1).expand(len(micro_batch))[head_sequence]
        elif float(temperature) != 1.0:
            rows = torch.full((len(forward.labels),), float(temperature), device=forward.labels.device)
        entropy_from_logits = self.compute_entropy_from_logits
        if self.engine_config.entropy_from_logits_with_chunking:
            entropy_from_logits = partial(
                entropy_from_logits, chunk_size=self.engine_config.entropy_from_logits_chunk_size
            )
        return HeadJob(
            labels=forward.labels,
            temperature=rows,
            with_entropy=tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False),
            with_sum_pi_squared=tu.get_non_tensor_data(micro_batch, "calculate_sum_pi_squared", default=False),
            entropy_from_logits=entropy_from_logits,
            checkpoint_entropy=self.engine_config.entropy_checkpointing,
        )

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Callable | None
    ) -> dict[str, torch.Tensor]:
        if not self.packed:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        forward, job, chunked = output_args
        self._check_every_layer_attended(forward)
        columns_NF = output.logits.squeeze(0) if chunked else job.outputs(output.logits.squeeze(0))
        offsets = micro_batch["input_ids"].offsets()
        return {name: forward.to_jagged(columns_NF[:, i], offsets) for i, name in enumerate(job.names)}

    def _check_every_layer_attended(self, forward: PackedForward) -> None:
        calls = forward.attention.calls.value
        if calls != self.num_attention_layers:
            raise RuntimeError(
                f"packed attention ran in {calls} of {self.num_attention_layers} layers of "
                f"{self.model_config.architectures}: its other layers mix tokens in a way that is not supported; "
                "set actor_rollout_ref.actor.use_prefix_grouper=False"
            )

    def _plan_metrics(self, plan: MicroBatchPlan, seconds: float, forward_only: bool) -> dict[str, list[float]]:
        """Totals over all data-parallel ranks, so every rank reports the same figures."""
        local = {
            "logical_tokens": sum(layout.num_logical_tokens for layout in plan.layouts),
            "physical_tokens": sum(layout.num_rows for layout in plan.layouts),
            "groups": sum(layout.num_roots for layout in plan.layouts),
            "micro_batches": len(plan.layouts),
            "flops": self.model_flops.forward(plan.layouts) * (1 if forward_only else 3),
            "seconds": seconds,
        }
        ranks = over_ranks(local, self.get_data_parallel_group())
        total = {name: sum(rank[name] for rank in ranks) for name in local}
        num_devices = len(ranks) * self.ulysses_sequence_parallel_size
        peak = get_device_flops("B") * 1e9 * num_devices * max(rank["seconds"] for rank in ranks)
        return {
            "prefix_grouper/logical_tokens": [float(total["logical_tokens"])],
            "prefix_grouper/physical_tokens": [float(total["physical_tokens"])],
            "prefix_grouper/dedup_ratio": [total["logical_tokens"] / total["physical_tokens"]],
            "prefix_grouper/groups_per_micro_batch": [total["groups"] / total["micro_batches"]],
            "prefix_grouper/mfu_physical": [total["flops"] / peak],
            f"prefix_grouper/attention_backend/{self.kernel.name}": [1.0],
        }


class PrefixGrouperFSDPEngineWithValueHead(FSDPEngineWithValueHead):
    """Value-model engine; packed mode is rejected by name until it is supported."""
