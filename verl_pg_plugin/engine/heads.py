"""What an actor reads from the logits, computed inside the head so that logits never have to leave it.

A transformers decoder ends with ``logits = lm_head(hidden_states)``. Before the forward the head is asked for log-probs
(and entropy) in place of logits. It computes them where FSDP has gathered its weight: chunk by chunk, since the logits
of many response tokens and their gradient are larger than everything else, or by verl's fused linear cross entropy.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn
from torch.utils.checkpoint import checkpoint
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

from verl_pg_plugin.engine.batch import FUSED_OFF, uses_top_k
from verl_pg_plugin.engine.inputs import ModelInputs
from verl_pg_plugin.lm_head import fused_obstacle, head_obstacle
from verl_pg_plugin.transfer import send

logger = logging.getLogger(__name__)
TOP_K_OUTPUTS = ("distillation_losses", "student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage")
"""What verl's loss of a teacher's top k returns of each token."""
ForwardOutputs = Callable[..., tuple[list[str], torch.Tensor]]
"""C names and (N, C) outputs of a rank's labels, from the model, ``ModelInputs``, verl's fields and loss."""
FusedKernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(N,) log-probs and entropy from (N, E) hidden states, (V, E) weight, (N,) labels and a temperature."""
TopKLoss = Callable[[torch.Tensor, slice], list[torch.Tensor]]
"""From the logits (M, V) of the labels in a slice, outputs (M,) each."""


def teacher_top_k(loss: Callable[..., Any] | None, micro_batch: TensorDict, index: torch.Tensor) -> TopKLoss:
    """``TOP_K_OUTPUTS`` of labels by verl's loss, with what the teacher said of each.

    verl calls its ``loss`` inside the forward with the student's logits, here of a chunk of labels, and then with what
    that returned. ``index`` is ``ModelInputs.label_index``.
    """
    assert loss is not None, "a teacher's top k is asked for without the loss that reads it"
    names = "teacher_logprobs", "teacher_ids"
    teacher_NK = {name: micro_batch[name].values().index_select(0, index) for name in names}
    # verl's loss takes this rank's equal part of what it is given, and all of this is of this rank.
    ranks = get_ulysses_sequence_parallel_world_size()

    def outputs(logits_NV: torch.Tensor, part: slice) -> list[torch.Tensor]:
        bounds = send(torch.tensor([0, ranks * len(logits_NV)]), logits_NV.device)
        of_part = {
            name: torch.nested.nested_tensor_from_jagged(values[part].repeat(ranks, 1), bounds)
            for name, values in teacher_NK.items()
        }
        found = loss(student_logits=logits_NV.unsqueeze(0), data=of_part)
        return [found[name].squeeze(0) for name in TOP_K_OUTPUTS]

    return outputs


@dataclass(frozen=True)
class LogProbRequest:
    """What to compute for N labels."""

    labels: torch.Tensor  # (N,) int64
    temperature: torch.Tensor | float  # (N,) float32, or one for all labels
    with_entropy: bool
    with_sum_pi_squared: bool
    entropy_from_logits: Callable[[torch.Tensor], torch.Tensor]  # verl's
    top_k: TopKLoss | None = None  # of a teacher, if the loss asks for it
    with_log_probs: bool = True  # not where that is the whole loss

    @property
    def names(self) -> list[str]:
        """verl's names of the outputs, in the order of the columns of ``outputs``."""
        wanted = (self.with_sum_pi_squared, self.with_entropy, self.with_log_probs)
        return [*(TOP_K_OUTPUTS if self.top_k else ()), *compress(("sum_pi_squared", "entropy", "log_probs"), wanted)]

    def outputs(self, logits_NV: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """(N, len(names)) float32 from the logits of the labels in ``part``, through verl's own functions."""
        if isinstance(self.temperature, torch.Tensor):
            logits_NV = logits_NV / self.temperature[part].clamp(min=1e-8).to(logits_NV.dtype).unsqueeze(-1)
        elif self.temperature != 1.0:
            logits_NV = logits_NV / max(self.temperature, 1e-8)
        columns = self.top_k(logits_NV, part) if self.top_k else []
        if self.with_sum_pi_squared:
            columns.append(verl_F.calculate_sum_pi_squared_from_logits(logits_NV))
        if self.with_entropy:
            columns.append(self.entropy_from_logits(logits_NV))
        if self.with_log_probs:
            alone = not columns  # only then flash-attn's cross entropy may write the gradient over the logits
            columns.append(verl_F.logprobs_from_logits(logits_NV, self.labels[part], inplace_backward=alone))
        return torch.stack([column.to(torch.promote_types(column.dtype, torch.float32)) for column in columns], dim=-1)


def read_request(
    micro_batch: TensorDict,
    inputs: ModelInputs,
    loss: Callable[..., Any] | None,
    config: Any,
    entropy: Callable[..., torch.Tensor],
) -> LogProbRequest:
    """What the trainer asks for of a micro-batch on the device; ``config`` is verl's of the engine."""
    temperature = micro_batch["temperature"]
    if isinstance(temperature, torch.Tensor):
        per_sample = temperature.to(torch.float32).reshape(-1).expand(len(micro_batch))
        temperature = per_sample.index_select(0, inputs.label_sequence)
    else:
        temperature = float(temperature)
    if config.entropy_from_logits_with_chunking:
        entropy = partial(entropy, chunk_size=config.entropy_from_logits_chunk_size)
    if config.entropy_checkpointing:
        entropy = partial(checkpoint, entropy, use_reentrant=False)
    return LogProbRequest(
        labels=inputs.labels,
        temperature=temperature,
        with_entropy=tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False),
        with_sum_pi_squared=tu.get_non_tensor_data(micro_batch, "calculate_sum_pi_squared", default=False),
        entropy_from_logits=entropy,
        top_k=teacher_top_k(loss, micro_batch, inputs.label_index) if uses_top_k(micro_batch) else None,
        with_log_probs=not tu.get_non_tensor_data(micro_batch, "distillation_only", default=False),
    )


class LogProbHead:
    """Stands in for the ``forward`` of a model's output embedding; without a request it is the linear layer.

    ``chunk_size`` labels have their logits held at once. A request of up to two chunks is left to the linear layer,
    since computing logits twice costs more there. A ``fused`` kernel computes every request.
    """

    def __init__(self, head: nn.Linear, chunk_size: int = 0, fused: FusedKernel | None = None) -> None:
        self.head, self.chunk_size, self.fused = head, chunk_size, fused
        self._request: LogProbRequest | None = None
        head.forward = self.forward

    @contextmanager
    def computing(self, request: LogProbRequest) -> Iterator[bool]:
        """Let a forward within the block return the outputs of ``request`` for logits; yields False where it will not.

        transformers calls the head without keywords, so this block carries the request instead of the context.
        """
        self._request = request if self.fused or len(request.labels) > 2 * self.chunk_size else None
        try:
            yield self._request is not None
        finally:
            self._request = None

    def forward(self, hidden_1NE: torch.Tensor) -> torch.Tensor:
        """(1, N, V) logits, or (1, N, len(names)) outputs of the request."""
        if (request := self._request) is None:
            return F.linear(hidden_1NE, self.head.weight, self.head.bias)
        hidden_NE = hidden_1NE.squeeze(0)
        if self.fused is None:
            found = _ChunkedOutputs.apply(hidden_NE, self.head.weight, self.head.bias, request, self.chunk_size)
            return found.unsqueeze(0)
        log_probs, entropy = self.fused(hidden_NE, self.head.weight, request.labels, request.temperature)
        columns = [entropy, log_probs] if request.with_entropy else [log_probs]
        for column in columns:
            if column.requires_grad:
                column.register_hook(torch.Tensor.contiguous)  # as the Triton kernels insist; stack's is strided
        return torch.stack([column.to(log_probs.dtype) for column in columns], dim=-1).unsqueeze(0)


def value_outputs(module: nn.Module, inputs: ModelInputs, *_: Any) -> tuple[list[str], torch.Tensor]:
    """Call a token classifier with one label: ``values`` at the tokens that predict responses."""
    values_GS1 = module(**inputs.keywords).logits
    return ["values"], inputs.at_labels(values_GS1.index_select(1, inputs.head_columns))


def language_model_outputs(
    module: nn.Module,
    inputs: ModelInputs,
    fields: TensorDict,
    loss: Callable[..., Any] | None,
    *,
    head: LogProbHead | None,
    config: Any,
    entropy: Callable[..., torch.Tensor],
) -> tuple[list[str], torch.Tensor]:
    """Call a language model: ``log_probs``, ``entropy`` and other outputs; for the arguments see ``read_request``.

    Without a ``head``, or where it leaves a request to the linear layer, all logits are held at once.
    """
    request = read_request(fields, inputs, loss, config, entropy)
    # transformers passes the context on to every layer: to ``attention.interface`` or ``mixers.delta_layer``.
    with nullcontext(False) if head is None else head.computing(request) as in_head:
        logits = module(**inputs.keywords, logits_to_keep=inputs.head_columns).logits
    found_NC = inputs.at_labels(logits)
    if not in_head:
        return request.names, request.outputs(found_NC)
    if found_NC.shape[-1] != len(request.names):
        raise RuntimeError(
            "the model's logits are not what its head returned; set ++prefix_grouper.logits_chunk_size=0 and "
            "actor_rollout_ref.model.use_fused_kernels=False"
        )
    return request.names, found_NC


def install_head(module: Any, model_config: Any, chunk_size: int) -> LogProbHead | None:
    """Let the head of a transformers model compute log-probs; None where all logits are held at once.

    That is so with ``chunk_size`` 0, and, with a warning, where chunks could change the numbers: the head is not a
    plain matrix or does not come last. With fused kernels that is a ValueError.
    """
    if model_config.use_fused_kernels:
        if obstacle := fused_obstacle(module):
            raise ValueError(f"use_fused_kernels=True: {obstacle}; {FUSED_OFF}")
        return LogProbHead(module.get_output_embeddings(), fused=_kernel(model_config.fused_kernel_options))
    if chunk_size <= 0:
        return None
    if obstacle := head_obstacle(module):
        logger.warning("logits of all response tokens are held at once: %s", obstacle)
        return None
    return LogProbHead(module.get_output_embeddings(), chunk_size)


def _kernel(options: Mapping[str, Any]) -> FusedKernel:
    backend = options.get("impl_backend")
    if backend == "triton":
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy  # needs Triton

        return lambda *given: linear_cross_entropy(*given, "none")
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return FusedLinearForPPO(impl_backend=backend)


class _ChunkedOutputs(torch.autograd.Function):
    """``request.outputs(linear(hidden, weight, bias))`` with the logits of one chunk of labels at a time.

    The backward recomputes them and adds the weight's gradient in float32: cutting rounds no more than one product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        request: LogProbRequest,
        chunk_size: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V)
        ctx.request = request
        device = hidden_NE.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.parts = [slice(start, start + chunk_size) for start in range(0, len(hidden_NE), chunk_size)]
        return torch.cat([request.outputs(F.linear(hidden_NE[part], weight_VE, bias_V), part) for part in ctx.parts])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_NC,) = grad_outputs
        hidden_NE, weight_VE, bias_V = ctx.saved_tensors
        wide = torch.promote_types(weight_VE.dtype, torch.float32)
        # A frozen head, as under LoRA, gets no gradient: as large as the weight, and a third of the backward.
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_NE) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VE, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for part in ctx.parts:
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                logits = F.linear(hidden_NE[part], weight_VE.detach(), None if bias_V is None else bias_V.detach())
                logits = logits.detach().requires_grad_()
                outputs = ctx.request.outputs(logits, part)
            (grad_logits,) = torch.autograd.grad(outputs, logits, grad_NC[part])
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits.to(weight_VE.dtype) @ weight_VE
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden_NE[part].to(grad_logits.dtype))
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)
        narrowed = (None if grad is None else grad.to(weight_VE.dtype) for grad in (grad_weight, grad_bias))
        return grad_hidden, *narrowed, None, None


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b`` without rounding the product to the dtype of the factors first."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
