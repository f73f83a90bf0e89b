"""verl's FSDP engines with shared prefixes: language-model head and value head."""

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_pg_plugin import upstream
from verl_pg_plugin.engine.forward_rows import ForwardRows
from verl_pg_plugin.engine.heads.chunked_head import ChunkedHead
from verl_pg_plugin.engine.heads.fused_head import FusedHead, check_fused_batch
from verl_pg_plugin.engine.heads.lm_head import HeadJob, JobHead
from verl_pg_plugin.engine.heads.value_model import load_value_model
from verl_pg_plugin.engine.requirements import check_lm_head
from verl_pg_plugin.engine.shared_prefix_engine import SharedPrefixMixin


class PrefixGrouperFSDPEngineWithLMHead(SharedPrefixMixin, FSDPEngineWithLMHead):
    """Language-model engine: ``log_probs``, ``entropy`` and ``sum_pi_squared`` of the rows in front of responses."""

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        if self.sharing is not None:
            check_lm_head(module)
            if not self._is_lora:
                self.job_head = self._install_head(module)
        return module

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        module = super()._build_lora_module(module)
        if self.sharing is not None:
            self.job_head = self._install_head(module.get_base_model())
        return module

    def _install_head(self, module: nn.Module) -> JobHead | None:
        assert self.sharing is not None
        if not self.sharing.head_takes_jobs:
            return None
        if self.model_config.use_fused_kernels:
            return FusedHead.install(module, self.model_config.fused_kernel_options.get("impl_backend"))
        return ChunkedHead.install(module, self.engine_config.prefix_grouper.logits_chunk_size)

    def _check_batch(self, data: TensorDict) -> None:
        super()._check_batch(data)
        if self.model_config.use_fused_kernels:
            check_fused_batch(data)

    def inputs_of(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        rows = self.rows_of(micro_batch)
        job = self._head_job(rows, micro_batch)
        in_head = self.job_head is not None and self.job_head.takes(job)
        return {**rows.model_inputs(), "logits_to_keep": rows.head_columns}, (rows, job, in_head)

    def _head_job(self, rows: ForwardRows, micro_batch: TensorDict) -> HeadJob:
        temperature = micro_batch["temperature"]
        if isinstance(temperature, torch.Tensor):
            per_sample = temperature.to(torch.float32).reshape(-1).expand(len(micro_batch))
            temperature = per_sample.index_select(0, rows.head_sequence)
        entropy_from_logits = self.compute_entropy_from_logits
        if self.engine_config.entropy_from_logits_with_chunking:
            entropy_from_logits = partial(
                entropy_from_logits, chunk_size=self.engine_config.entropy_from_logits_chunk_size
            )
        return HeadJob(
            labels=rows.labels,
            temperature=temperature if isinstance(temperature, torch.Tensor) else float(temperature),
            with_entropy=tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False),
            with_sum_pi_squared=tu.get_non_tensor_data(micro_batch, "calculate_sum_pi_squared", default=False),
            entropy_from_logits=entropy_from_logits,
            checkpoint_entropy=self.engine_config.entropy_checkpointing,
        )

    def outputs_of(self, output: Any, output_args: Any, micro_batch: TensorDict) -> dict[str, torch.Tensor]:
        rows, job, in_head = output_args
        self.shared_model.check_every_layer_mixed(rows)
        logits_NV = rows.at_head_rows(output.logits)
        if in_head and logits_NV.shape[-1] != len(job.names):
            raise RuntimeError(
                "the model's logits are not what its head returned; set ++prefix_grouper.logits_chunk_size=0 and "
                "actor_rollout_ref.model.use_fused_kernels=False"
            )
        return self.jagged_outputs(rows, job.names, logits_NV if in_head else job.outputs(logits_NV), micro_batch)


class PrefixGrouperFSDPEngineWithValueHead(SharedPrefixMixin, FSDPEngineWithValueHead):
    """Value-model engine: ``values`` of the rows in front of responses, which verl's critic reads.

    The model is the checkpoint's token classifier with one label: transformers' own or the checkpoint's.
    """

    def _build_module(self) -> nn.Module:
        # verl loads value models for flash-attn only, which neither shared prefixes nor a CPU can use.
        if self.sharing is None and get_device_name() != "cpu":
            return super()._build_module()
        with upstream.value_models_loaded_by(load_value_model):
            return super()._build_module()

    def inputs_of(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        rows = self.rows_of(micro_batch)
        return rows.model_inputs(), rows

    def outputs_of(self, output: Any, output_args: Any, micro_batch: TensorDict) -> dict[str, torch.Tensor]:
        rows = output_args
        self.shared_model.check_every_layer_mixed(rows)
        values_N1 = rows.at_head_rows(output.logits.index_select(1, rows.head_columns))
        return self.jagged_outputs(rows, ["values"], values_N1, micro_batch)
