"""Run one micro-batch: select its sequences, prefill, call the model and the loss, and run the backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FSDPModule
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from verl_pg_plugin.attention.cache import PrefixCache
from verl_pg_plugin.attention.kernels import Kernel
from verl_pg_plugin.config.keys import FROM_UPDATE
from verl_pg_plugin.engine.activations import LayerCheckpoints, PinnedCopier
from verl_pg_plugin.engine.heads import ForwardOutputs
from verl_pg_plugin.engine.inputs import ModelInputs, SequenceSelector, make_context, make_inputs
from verl_pg_plugin.engine.metrics import MiniBatchCosts
from verl_pg_plugin.engine.plan import Plan, PlannedMicroBatch
from verl_pg_plugin.engine.prepare import SharedModel, own_attention_refused
from verl_pg_plugin.engine.verify import Noise, Responses, Verifier, read_responses, rounding_noise
from verl_pg_plugin.layout import Layout, Sequences
from verl_pg_plugin.modalities import Modality
from verl_pg_plugin.planning.activation_level import Level


@dataclass(frozen=True)
class MiniBatch:
    """Settings, plan and cache of a mini-batch, and the forward of the model."""

    module: nn.Module
    forward_outputs: ForwardOutputs  # ``heads.language_model_outputs`` or ``heads.value_outputs``
    shared_model: SharedModel
    modality: Modality
    kernel: Kernel
    device: torch.device
    dtype: torch.dtype  # of autocast
    sp_group: dist.ProcessGroup | None  # Ulysses ranks that share the tokens
    token_multiple: int  # pad tokens to a multiple of it
    plan: Plan
    selector: SequenceSelector
    costs: MiniBatchCosts
    verifier: Verifier
    loss_function: Callable | None
    forward_only: bool
    dp_group: dist.ProcessGroup | None  # for the loss
    copier: PinnedCopier | None
    backward: Callable[[torch.Tensor], None]
    cache: PrefixCache = field(default_factory=PrefixCache)

    @property
    def kind(self) -> str:
        return "forward-only" if self.forward_only else "update"

    def take(self, indices: list[int]) -> tuple[Sequences, TensorDict]:
        """Return some sequences as numpy on the host, and their verl fields on the device."""
        return self.plan.sequences.select(indices), self.selector.take(indices, self.device)

    def inputs(self, layout: Layout, sequences: Sequences, **of_context: Any) -> ModelInputs:
        """Make the context of a forward and the model's inputs; ``of_context`` goes to ``make_context``."""
        context = make_context(layout, self.kernel, self.device, self.sp_group, **of_context)
        return make_inputs(context, layout, sequences, self.modality, self.device, self.plan.shown, self.token_multiple)

    def compute(self, inputs: ModelInputs, fields: TensorDict) -> dict[str, torch.Tensor]:
        """Run the model; return named outputs, jagged (B, length) as verl's losses read them."""
        with own_attention_refused(self.shared_model.name):
            names, outputs_NC = self.forward_outputs(self.module, inputs, fields, self.loss_function)
        self.shared_model.check_every_layer_mixed(inputs.context)
        values_CL, offsets = inputs.on_sequences(outputs_NC), fields["input_ids"].offsets()
        return {name: torch.nested.nested_tensor_from_jagged(values_CL[i], offsets) for i, name in enumerate(names)}

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)


def run_micro_batch(batch: MiniBatch, planned: PlannedMicroBatch) -> dict[str, Any]:
    """Run the forward and backward of a micro-batch; return ``model_output``, ``loss`` and ``metrics``."""
    forward_only, costs = batch.forward_only, batch.costs
    sequences, fields = batch.take(planned.sequences)
    # A chunk of an update removes its own tokens from the cache; those that it reads are cached or prefilled. The
    # prefill runs first: FSDP2 expects each backward directly after its forward.
    consumed = [] if forward_only else batch.cache.consume(planned.layout)
    _prefill(batch, planned)
    samples = batch.verifier.choose(planned, sequences, batch.kind)
    if samples:
        alone = cache(partial(_compute_alone, batch, [planned.sequences[sample] for sample in samples]))
        with batch.verifier.timed():
            alone(None)
            if batch.verifier.options.verify_tolerance is None:
                alone(rounding_noise)
    access = batch.cache.access(planned.layout, publishes=forward_only, consumed=consumed)
    checkpoint = None if planned.level is Level.ALL else LayerCheckpoints(planned.level, batch.copier).run
    inputs = batch.inputs(planned.layout, sequences, cache=access, checkpoint=checkpoint)
    loss, metrics = torch.ones((), device=batch.device), {}  # torch.tensor(1.0) would wait for the device
    with batch.autocast():
        outputs = batch.compute(inputs, fields)
        if batch.loss_function is not None:
            read = _add_old_log_probs(outputs, fields)
            loss, metrics = batch.loss_function(model_output=read, data=fields, dp_group=batch.dp_group)
    if not forward_only:
        batch.backward(loss)

    outputs = {name: values.detach() for name, values in outputs.items()}
    if samples:
        got = read_responses(outputs, samples, sequences.prompt_lengths)
        costs.num_verified += len(set(samples))
        with batch.verifier.timed():
            max_error = batch.verifier.check(got, alone, planned, samples, fields, batch.kind)
        costs.verify_max_error = max(costs.verify_max_error, max_error)
        reshard(batch.module)
    costs.num_padding += inputs.num_padding
    return {"model_output": outputs, "loss": loss.detach(), "metrics": metrics}


def _add_old_log_probs(outputs: dict[str, torch.Tensor], fields: TensorDict) -> dict[str, torch.Tensor]:
    """Set ``old_log_probs`` of a batch with ``FROM_UPDATE`` in place, and return the outputs that the loss reads."""
    if not tu.get_non_tensor_data(fields, FROM_UPDATE, default=False):
        return outputs
    fields["old_log_probs"] = no_padding_2_padding(outputs["log_probs"].detach(), fields)
    reads_entropy = tu.get_non_tensor_data(fields, "calculate_entropy", default=False)
    return {name: values for name, values in outputs.items() if reads_entropy or name != "entropy"}


def reshard(module: nn.Module) -> None:
    """Free the gathered weights of all FSDP2 modules; modules of FSDP1 are left as they are.

    FSDP2 keeps the root's weights gathered until a backward frees them. So this runs after forwards without one: after
    verified samples, and before free memory is measured.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _prefill(batch: MiniBatch, planned: PlannedMicroBatch) -> None:
    """Compute, without gradient, the tokens that a chunk reads and no earlier chunk has published."""
    if (layout := planned.prefill) is None:
        return
    sequences, fields = batch.take(planned.sequences[:1])  # a chunk reads a prefix of its first sequence
    access = batch.cache.access(layout, publishes=True, prefill=True)
    inputs = batch.inputs(layout, sequences, cache=access)
    training = batch.module.training
    batch.module.eval()  # compiled layers then reuse their graphs of forwards alone; dropout is refused
    try:
        with torch.no_grad(), batch.autocast():
            batch.compute(inputs, fields)
    finally:
        batch.module.train(training)


def _compute_alone(batch: MiniBatch, chosen: list[int], make_noise: Callable[[], Noise] | None) -> Responses:
    """Compute each sample in a separate forward, with noise in its layers if ``make_noise`` is given."""
    responses: dict[str, list[torch.Tensor]] = {}
    for index in chosen:
        sequences, fields = batch.take([index])
        inputs = batch.inputs(sequences.unshared().build_layout(), sequences, perturb=make_noise and make_noise())
        with torch.no_grad(), batch.autocast():
            outputs = batch.compute(inputs, fields)
        for name, values in read_responses(outputs, [0], sequences.prompt_lengths).items():
            responses.setdefault(name, []).extend(values)
    return responses
