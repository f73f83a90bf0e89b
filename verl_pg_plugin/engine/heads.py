"""Compute log-probs and entropy inside of the LM head, so that no tensor holds the logits of all response tokens.

A transformers decoder ends with ``logits = lm_head(hidden_states)``. A request, set before the forward, makes the head
return log-probs instead. The head runs while FSDP has gathered its weight, so the logits are computed in there: chunk
by chunk, or by verl's fused linear cross entropy.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

from verl_pg_plugin.config.keys import FROM_UPDATE
from verl_pg_plugin.engine.batch import FUSED_OFF, uses_top_k
from verl_pg_plugin.engine.inputs import ModelInputs
from verl_pg_plugin.lm_head import fused_obstacle, head_obstacle
from verl_pg_plugin.transfer import send

logger = logging.getLogger(__name__)
ENTROPY_CHUNK = 2048  # labels of an entropy without gradient at a time
TOP_K_OUTPUTS = ("distillation_losses", "student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage")
"""Per-token outputs of verl's loss over a teacher's top k."""
ForwardOutputs = Callable[..., tuple[list[str], Tensor]]
"""(model, ``ModelInputs``, verl's fields, loss) -> C names and (N, C) outputs of a rank's labels."""
FusedKernel = Callable[..., tuple[Tensor, Tensor]]
"""((N, E) hidden states, (V, E) weight, (N,) labels, temperature) -> (N,) log-probs and (N,) entropy."""
TopKLoss = Callable[[Tensor, slice], list[Tensor]]
"""((M, V) logits of the labels in a slice, the slice) -> outputs, (M,) each."""


def teacher_top_k(loss: Callable | None, micro_batch: TensorDict, index: Tensor) -> TopKLoss:
    """Return a function that computes ``TOP_K_OUTPUTS`` of a chunk of labels by verl's loss.

    verl calls ``loss`` with the student's logits inside of the forward, and later with the outputs of that call.
    ``index`` is ``ModelInputs.label_index``.
    """
    assert loss is not None, "a teacher's top k needs a loss"
    names = "teacher_logprobs", "teacher_ids"
    teacher_NK = {name: micro_batch[name].values().index_select(0, index) for name in names}
    # verl's loss cuts its inputs into an equal part for each Ulysses rank, but these are already this rank's part.
    ranks = get_ulysses_sequence_parallel_world_size()

    def outputs(logits_NV: Tensor, part: slice) -> list[Tensor]:
        bounds = send(torch.tensor([0, ranks * len(logits_NV)]), logits_NV.device)
        of_part = {
            name: torch.nested.nested_tensor_from_jagged(values[part].repeat(ranks, 1), bounds)
            for name, values in teacher_NK.items()
        }
        losses = loss(student_logits=logits_NV.unsqueeze(0), data=of_part)
        return [losses[name].squeeze(0) for name in TOP_K_OUTPUTS]

    return outputs


@dataclass(frozen=True)
class LogProbRequest:
    """Outputs to compute for N labels."""

    labels: Tensor  # (N,) int64
    temperature: Tensor | float  # (N,) float32, or one for all labels
    with_entropy: bool
    with_sum_pi_squared: bool
    entropy_from_logits: Callable[[Tensor], Tensor]  # verl's
    top_k: TopKLoss | None = None
    entropy_has_gradient: bool = True  # False if the loss does not read it
    with_log_probs: bool = True  # False if the top-k loss is the whole loss

    @property
    def names(self) -> list[str]:
        """verl's names of the columns of ``outputs``."""
        flags = (self.with_sum_pi_squared, self.with_entropy, self.with_log_probs)
        return [*(TOP_K_OUTPUTS if self.top_k else ()), *compress(("sum_pi_squared", "entropy", "log_probs"), flags)]

    def outputs(self, logits_NV: Tensor, part: slice = slice(None)) -> Tensor:
        """Return (N, len(names)) float32 from the logits of the labels in ``part``, by verl's functions."""
        if isinstance(self.temperature, Tensor):
            logits_NV = logits_NV / self.temperature[part].clamp(min=1e-8).to(logits_NV.dtype).unsqueeze(-1)
        elif self.temperature != 1.0:
            logits_NV = logits_NV / max(self.temperature, 1e-8)
        columns = self.top_k(logits_NV, part) if self.top_k else []
        if self.with_sum_pi_squared:
            columns.append(verl_F.calculate_sum_pi_squared_from_logits(logits_NV))
        if self.with_entropy:
            if self.entropy_has_gradient:
                columns.append(self.entropy_from_logits(logits_NV))
            else:  # in chunks: the memory of an update may be planned without it
                with torch.no_grad():
                    chunks = map(self.entropy_from_logits, logits_NV.split(ENTROPY_CHUNK))
                    columns.append(torch.cat([*chunks]))
        if self.with_log_probs:
            # flash-attn's cross entropy may overwrite the logits with their gradient if nothing else reads them.
            unread = not any(column.requires_grad for column in columns)
            columns.append(verl_F.logprobs_from_logits(logits_NV, self.labels[part], inplace_backward=unread))
        return torch.stack([column.to(torch.promote_types(column.dtype, torch.float32)) for column in columns], dim=-1)


def read_request(
    micro_batch: TensorDict, inputs: ModelInputs, loss: Callable | None, config: Any, entropy: Callable[..., Tensor]
) -> LogProbRequest:
    """Read the request from the fields of a micro-batch on the device; ``config`` is verl's engine config."""
    temperature = micro_batch["temperature"]
    if isinstance(temperature, Tensor):
        per_sample = temperature.to(torch.float32).reshape(-1).expand(len(micro_batch))
        temperature = per_sample.index_select(0, inputs.label_sequence)
    else:
        temperature = float(temperature)
    if config.entropy_from_logits_with_chunking:
        entropy = partial(entropy, chunk_size=config.entropy_from_logits_chunk_size)
    if config.entropy_checkpointing:
        entropy = partial(checkpoint, entropy, use_reentrant=False)
    loss_reads_entropy = tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False)
    return LogProbRequest(
        labels=inputs.labels,
        temperature=temperature,
        with_entropy=loss_reads_entropy or tu.get_non_tensor_data(micro_batch, FROM_UPDATE, default=False),
        entropy_has_gradient=loss_reads_entropy,
        with_sum_pi_squared=tu.get_non_tensor_data(micro_batch, "calculate_sum_pi_squared", default=False),
        entropy_from_logits=entropy,
        top_k=teacher_top_k(loss, micro_batch, inputs.label_index) if uses_top_k(micro_batch) else None,
        with_log_probs=not tu.get_non_tensor_data(micro_batch, "distillation_only", default=False),
    )


class LogProbHead:
    """Replaces the ``forward`` of a model's output embedding; without a request it is the linear layer.

    A ``fused`` kernel computes every request. Without one, logits of ``chunk_size`` labels are held at once, and the
    linear layer computes requests of up to two chunks, since chunks compute their logits twice.
    """

    def __init__(self, head: nn.Linear, chunk_size: int = 0, fused: FusedKernel | None = None) -> None:
        self.head, self.chunk_size, self.fused = head, chunk_size, fused
        self._request: LogProbRequest | None = None
        head.forward = self.forward

    @contextmanager
    def computing(self, request: LogProbRequest) -> Iterator[bool]:
        """Make a forward in this block return the outputs of ``request``; yield False if it returns logits instead.

        transformers calls the head without keywords, so the context cannot carry the request.
        """
        self._request = request if self.fused or len(request.labels) > 2 * self.chunk_size else None
        try:
            yield self._request is not None
        finally:
            self._request = None

    def forward(self, hidden_1NE: Tensor) -> Tensor:
        """Return (1, N, V) logits, or (1, N, len(names)) outputs of the request."""
        if (request := self._request) is None:
            return F.linear(hidden_1NE, self.head.weight, self.head.bias)
        hidden_NE = hidden_1NE.squeeze(0)
        if self.fused is None:
            outputs_NC = _ChunkedOutputs.apply(hidden_NE, self.head.weight, self.head.bias, request, self.chunk_size)
            return outputs_NC.unsqueeze(0)
        log_probs, entropy = self.fused(hidden_NE, self.head.weight, request.labels, request.temperature)
        entropy = entropy if request.entropy_has_gradient else entropy.detach()
        columns = [entropy, log_probs] if request.with_entropy else [log_probs]
        for column in columns:
            if column.requires_grad:
                column.register_hook(Tensor.contiguous)  # stack's gradient is strided; Triton kernels reject it
        return torch.stack([column.to(log_probs.dtype) for column in columns], dim=-1).unsqueeze(0)


def value_outputs(module: nn.Module, inputs: ModelInputs, *_: Any) -> tuple[list[str], Tensor]:
    """Call a token classifier with one label; return ``values`` at the tokens that predict responses."""
    values_GS1 = module(**inputs.keywords).logits
    return ["values"], inputs.at_labels(values_GS1.index_select(1, inputs.head_columns))


def language_model_outputs(
    module: nn.Module,
    inputs: ModelInputs,
    fields: TensorDict,
    loss: Callable | None,
    *,
    head: LogProbHead | None,
    config: Any,
    entropy: Callable[..., Tensor],
) -> tuple[list[str], Tensor]:
    """Call a language model; return ``log_probs``, ``entropy`` and other outputs. See ``read_request``.

    Without a ``head``, or if it leaves the request to the linear layer, all logits are held at once.
    """
    request = read_request(fields, inputs, loss, config, entropy)
    # transformers passes the context to every layer, which reads it in ``attention.interface`` or its mixer.
    with nullcontext(False) if head is None else head.computing(request) as in_head:
        logits = module(**inputs.keywords, logits_to_keep=inputs.head_columns).logits
    outputs = inputs.at_labels(logits)
    if not in_head:
        return request.names, request.outputs(outputs)
    if outputs.shape[-1] != len(request.names):
        raise RuntimeError(
            "the model changes what its head returns. Fix: set ++prefix_grouper.logits_chunk_size=0 and "
            "actor_rollout_ref.model.use_fused_kernels=False"
        )
    return request.names, outputs


def install_head(module: Any, model_config: Any, chunk_size: int) -> LogProbHead | None:
    """Let the head of a transformers model compute log-probs; return None if all logits are held at once.

    That is so if ``chunk_size`` is 0 and, with a warning, if the head is not a plain matrix or does not come last. With
    fused kernels such a head is a ValueError.
    """
    if model_config.use_fused_kernels:
        if obstacle := fused_obstacle(module):
            raise ValueError(f"use_fused_kernels=True: {obstacle}. Fix: {FUSED_OFF}")
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
    """``request.outputs(linear(hidden, weight, bias))`` that holds the logits of one chunk of labels at a time.

    The backward recomputes logits and sums the weight's gradient in float32, so chunks round no more than one product.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, request: LogProbRequest, chunk_size: int
    ) -> Tensor:
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V)
        ctx.request = request
        device = hidden_NE.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.parts = [slice(start, start + chunk_size) for start in range(0, len(hidden_NE), chunk_size)]
        return torch.cat([request.outputs(F.linear(hidden_NE[part], weight_VE, bias_V), part) for part in ctx.parts])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NC,) = grad_outputs
        hidden_NE, weight_VE, bias_V = ctx.saved_tensors
        wide = torch.promote_types(weight_VE.dtype, torch.float32)
        # The gradient of a frozen head, as under LoRA, would cost the memory of its weight and a third of the backward.
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_NE) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VE, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        request = ctx.request
        if request.with_entropy and not request.entropy_has_gradient:
            left = [column for column, name in enumerate(request.names) if name != "entropy"]
            request, grad_NC = replace(request, with_entropy=False), grad_NC[:, left]
        for part in ctx.parts:
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                logits = F.linear(hidden_NE[part], weight_VE.detach(), None if bias_V is None else bias_V.detach())
                logits = logits.detach().requires_grad_()
                outputs = request.outputs(logits, part)
            (grad_logits,) = torch.autograd.grad(outputs, logits, grad_NC[part])
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits.to(weight_VE.dtype) @ weight_VE
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden_NE[part].to(grad_logits.dtype))
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)
        narrowed = (None if grad is None else grad.to(weight_VE.dtype) for grad in (grad_weight, grad_bias))
        return grad_hidden, *narrowed, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute ``total += a @ b`` without rounding the product to the dtype of the factors."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
