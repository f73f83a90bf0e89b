"""verl's VeOmni engine with shared prefixes; needs the package veomni.

VeOmni's model files look attention up as transformers does, and FSDP2 shards its models. verl's VeOmni engine derives
from its FSDP engine. Router replay fixes the experts of each token, so sequences share tokens with equal experts only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn
from veomni.distributed.parallel_state import get_parallel_state
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import gather_outputs_and_unpad
from verl.utils.veomni.router_replay import RouterReplayAction, VeOmniRouterReplay
from verl.workers.engine.veomni import VeOmniEngineWithLMHead

from verl_pg_plugin.attention.cache import CacheKey
from verl_pg_plugin.engine.engine import SharedPrefixLanguageModel
from verl_pg_plugin.engine.inputs import ModelInputs
from verl_pg_plugin.engine.micro_batch import MiniBatch
from verl_pg_plugin.engine.prepare import prepare_config
from verl_pg_plugin.issue import BatchError
from verl_pg_plugin.layout import IntArray, Layout, PackedLayout, Sequences
from verl_pg_plugin.modalities import Modality
from verl_pg_plugin.transfer import to_device

ROUTES = "routed_experts"
"""verl's field and output (tokens, layers, experts per token) of every sequence."""
RECORDED = CacheKey(-1, ROUTES)
"""Key of the experts of cached tokens."""


@dataclass(frozen=True, kw_only=True)
class RoutedText(Modality):
    """Text whose experts the batch contains or the router records."""

    router: VeOmniRouterReplay

    def read(self, data: TensorDict, sequences: Sequences) -> Sequences:
        """Add their experts to the sequences; raise BatchError if the batch lacks them.

        Zeros mark a token that no router saw. With one expert per token zeros would be a choice, so that is refused.
        """
        sequences = super().read(data, sequences)
        empty = sequences.prompt_lengths == sequences.lengths
        if self.router.action is RouterReplayAction.RECORD and empty.any():
            raise BatchError(
                f"router_replay.mode=R2: sequence {int(np.argmax(empty))} has an empty response, whose experts are not "
                "recorded. Fix: drop such rows, or set router_replay.mode=R3"
            )
        if self.router.action is not RouterReplayAction.REPLAY:
            return sequences
        routed = data.get(ROUTES, None)
        if routed is None or not routed.is_nested or routed.shape[-1] < 2:
            raise BatchError(
                f"router replay needs {ROUTES}, two or more per token. Fix: set router_replay.mode=disabled, or for R3 "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
            )
        routes_NLK = routed.values().cpu().numpy()
        # A token is shared only if the next token's key is equal too, so keys contain the experts of the token before.
        numbers: dict[bytes, int] = {}
        before = np.roll([numbers.setdefault(routes_LK.tobytes(), len(numbers)) for routes_LK in routes_NLK], 1)
        before[sequences.offsets[:-1]] = -1
        keys = np.unique(sequences.tokens.astype(np.int64) * (len(before) + 1) + before, return_inverse=True)[1]
        return replace(sequences, keys=keys, routes=routes_NLK)


def _places(layout: PackedLayout, offsets: IntArray) -> IntArray:
    """Return (N,) indices of the sequences' tokens into [cached | packed] tokens; one past the end for last tokens."""
    cached = layout.num_cached
    tokens = np.full(offsets[-1], cached + layout.num_tokens)
    ends = tokens.copy()
    ends[layout.response_index] = np.append(layout.cached_heads, cached + layout.head_index)[layout.response_head]
    for first, last in zip(offsets[:-1].tolist(), (offsets[1:] - 1).tolist(), strict=True):
        segment = np.searchsorted(layout.cu_seqlens_q, ends[last - 1] - cached, side="right") - 1
        tokens[first:last] = layout.kv_index[layout.cu_seqlens_k[segment] :][: last - first]
    return tokens


@dataclass(frozen=True, kw_only=True)
class RoutedMiniBatch(MiniBatch):
    """A mini-batch whose experts are recorded or replayed."""

    router: VeOmniRouterReplay

    def inputs(self, layout: Layout, sequences: Sequences, **of_context: Any) -> ModelInputs:
        """Make the inputs of a forward, and prepare the routers for it."""
        inputs, router = super().inputs(layout, sequences, **of_context), self.router
        if router.action is RouterReplayAction.DISABLED:
            return inputs
        assert isinstance(layout, PackedLayout)
        if sequences.routes is None:
            router.begin_microbatch()
            return replace(inputs, places=to_device(_places(layout, sequences.offsets), self.device))
        routes_TLK = np.pad(sequences.routes[layout.token_index], [(0, inputs.num_padding), (0, 0), (0, 0)])
        group = self.sp_group
        start = 0 if group is None else inputs.num_own * dist.get_rank(group)
        own_TLK = to_device(routes_TLK[start : start + inputs.num_own], self.device, torch.int16).long()
        router.begin_microbatch(list(own_TLK.unbind(1)))
        return inputs

    def compute(self, inputs: ModelInputs, fields: TensorDict) -> dict[str, torch.Tensor]:
        """Run the model; if experts are recorded, add them to the outputs as ``ROUTES``."""
        outputs = super().compute(inputs, fields)
        router, cache = self.router, inputs.context.cache
        if inputs.places is None:
            if router.num_fired != router.num_targets:
                raise RuntimeError(f"{ROUTES} has {router.num_targets} layers, {router.num_fired} of the model route")
            return outputs
        routes_TLK = router.take_recorded()
        if (group := inputs.context.group) is not None:  # as bytes: NCCL does not support int16
            bytes_TLK = gather_outputs_and_unpad(routes_TLK.view(torch.uint8), gather_dim=0, group=group)
            routes_TLK = bytes_TLK.view(torch.int16)
        routes_TLK = routes_TLK[: inputs.layout.num_tokens]
        if cache is not None:
            cache.publish_values(RECORDED, routes_TLK)
            routes_TLK = cache.with_cached(RECORDED, routes_TLK)
        routes_NLK = F.pad(routes_TLK, (0, 0, 0, 0, 0, 1)).index_select(0, inputs.places)
        outputs[ROUTES] = torch.nested.nested_tensor_from_jagged(routes_NLK, fields["input_ids"].offsets())
        return outputs


class SharedPrefixVeOmniLanguageModel(SharedPrefixLanguageModel, VeOmniEngineWithLMHead):
    """Language-model engine in packed mode; VeOmni shards, loads and saves the model."""

    _autocast_dtype = torch.bfloat16  # verl's choice for VeOmni, whatever the dtype of the weights
    scaler = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device_mesh, size = get_parallel_state().fsdp_mesh, get_parallel_state().ulysses_size
        if size != self.ulysses_sequence_parallel_size:
            raise ValueError(
                f"ulysses_parallel_size={self.ulysses_sequence_parallel_size}: VeOmni keeps that of a process's first "
                f"engine, {size}. Fix: set one value in actor_rollout_ref.actor.veomni and actor_rollout_ref.ref.veomni"
            )

    def _maybe_apply_async_activation_offload(self, module: nn.Module) -> None:
        """Prepare the model; verl calls this after building and before sharding it."""
        prepare_config(module.config)
        self._take_over(module)
        self._finish_unsharded(module)

    def _build_model_optimizer(self) -> None:
        super()._build_model_optimizer()
        self._replace_checkpoints(self.module)  # VeOmni checkpoints layers when it shards them

    def initialize(self) -> None:
        super().initialize()
        if self._router_replay is not None:
            self.modality = RoutedText(router=self._router_replay)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a mini-batch; with R2 old log-probs record the experts, otherwise those of the batch are replayed."""
        router = self._router_replay
        if router is None or not tu.get_non_tensor_data(data, "enable_routing_replay", default=False):
            return super().forward_backward_batch(data, loss_function, forward_only)
        router.install(self.module)  # all engines of a process share one router
        try:
            (router.begin_record if forward_only and self._router_replay_mode == "R2" else router.begin_replay)()
            return super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            router.clear()

    def _mini_batch(self, *args: Any) -> MiniBatch:
        batch, router = super()._mini_batch(*args), self._router_replay
        return batch if router is None else RoutedMiniBatch(**vars(batch), router=router)
