"""vLLM's FlashAttention backend with shared decode: each group of requests reads its shared prefix once.

In a decode batch ``kernels.attend_prefixes`` reads each group's prefix, FlashAttention 3 attends to the rest of each
request, and ``kernels.merge_splits`` merges both. A step's first layer computes groups from block tables
(``groups.find_groups``), within vLLM's CUDA graph. All other batches run as in vLLM.

``rollout.register_with_vllm`` registers the backend; the engine's ``additional_config`` enables sharing.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from verl_pg_plugin.rollout import SHARED_DECODE
from verl_pg_plugin.rollout.groups import Groups, find_groups, max_splits
from verl_pg_plugin.rollout.kernels import BLOCK_M, BLOCK_N, Partials, attend_prefixes, merge_splits

MIN_SAVED_BYTES = 16 << 20
"""Bytes of keys and values that a layer must save in a step; with fewer, nothing is shared."""
MIN_EAGER_BYTES = 1 << 30
"""Bytes of keys and values that a layer must read in stock vLLM to share a batch larger than any CUDA graph. Launching
the additional kernels takes 0.28 ms a layer (one H200), in which the GPU reads as much."""

logger = init_logger(f"vllm.{__name__}")  # vLLM's log handlers serve only loggers below "vllm"


class SharedDecodeBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type["SharedDecodeImpl"]:
        return SharedDecodeImpl

    @staticmethod
    def get_builder_cls() -> type["SharedDecodeBuilder"]:
        return SharedDecodeBuilder


@dataclass(kw_only=True)
class SharedDecodeMetadata(FlashAttentionMetadata):
    """Metadata of a decode batch; the first layer computes the groups."""

    builder: "SharedDecodeBuilder"
    batch: CommonAttentionMetadata

    @cached_property
    def shared(self) -> tuple[Groups, FlashAttentionMetadata]:
        """Groups, and metadata of the rest of each request."""
        return self.builder.lay_out(self.batch)


class SharedDecodeBuilder(FlashAttentionMetadataBuilder):
    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return decode only: other batches run in vLLM's piecewise graphs."""
        if obstacle_in_config(vllm_config):
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        H, G, D = self.num_heads_q, self.num_heads_kv, self.headdim
        self.obstacle = obstacle_in_config(vllm_config) or obstacle_in_layers(vllm_config, layer_names, (H, G, D))
        if requests_shared_decode(vllm_config):
            state = f"off: {self.obstacle}" if self.obstacle else "on"
            logger.info("shared decode of %d layers is %s", len(layer_names), state)
        self.supports_update_block_table = bool(self.obstacle)  # groups come from the block table
        if self.obstacle:
            return
        self.max_requests = max(vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self.num_programs = -(-2 * torch.cuda.get_device_properties(device).multi_processor_count // G)
        self.requests_per_tile = BLOCK_M // (H // G)
        self.token_bytes = 2 * G * D * self.kv_cache_dtype.itemsize
        self.stream = torch.cuda.Stream(device)
        self.find_groups = torch.compile(find_groups, dynamic=True, fullgraph=True)
        S = max_splits(self.max_requests, self.num_programs, self.requests_per_tile)
        self.partials = Partials(torch.empty(S, H, D, device=device), torch.empty(S, H, device=device))

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Return False if decode is shared: vLLM's cascade attention needs one prefix and runs without CUDA graphs."""
        return bool(self.obstacle) and super().use_cascade_attention(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        batch = common_attn_metadata
        metadata = super().build(common_prefix_len, batch, fast_build)
        if self.obstacle or batch.max_query_len > 1 or batch.num_reqs == 1:
            return metadata
        is_eager = batch.num_reqs > (self.max_cudagraph_size or 0)
        if is_eager and batch.num_reqs * batch.max_seq_len * self.token_bytes < MIN_EAGER_BYTES:
            return metadata
        return SharedDecodeMetadata(**vars(metadata), builder=self, batch=batch)

    def lay_out(self, batch: CommonAttentionMetadata) -> tuple[Groups, FlashAttentionMetadata]:
        """Return groups, and metadata of the rest of each request, in the CUDA graph's shapes."""
        groups, rest_lens, rest_blocks = self.find_groups(
            batch.block_table_tensor[: batch.num_reqs],
            batch.seq_lens[: batch.num_reqs],
            self.block_size,
            requests_per_tile=self.requests_per_tile,
            tile_tokens=BLOCK_N,
            num_programs=self.num_programs,
            min_saved_tokens=MIN_SAVED_BYTES // self.token_bytes,
        )
        return groups, super().build(0, batch.replace(seq_lens=rest_lens, block_table_tensor=rest_blocks))


class SharedDecodeImpl(FlashAttentionImpl):
    def forward(
        self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: FlashAttentionMetadata, output: torch.Tensor, *scales: Any, **more: Any
    ) -> torch.Tensor:  # fmt: skip
        if not isinstance(attn_metadata, SharedDecodeMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more)
        # (blocks, 2, tokens, G, D) in vLLM 0.24, (blocks, G, tokens, 2 D) in 0.26
        caches = kv_cache.unbind(1) if kv_cache.dim() == 5 else kv_cache.transpose(1, 2).split(self.head_size, -1)
        key_cache, value_cache = map(canonicalize_singleton_dim_strides, caches)
        (groups, rest), builder = attn_metadata.shared, attn_metadata.builder
        builder.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(builder.stream):
            attend_prefixes(
                query, key_cache, value_cache, attn_metadata.block_table, groups, builder.partials, scale=self.scale,
                softcap=self.logits_soft_cap, num_programs=builder.num_programs, max_requests=builder.max_requests,
            )  # fmt: skip
        n = attn_metadata.num_actual_tokens
        _, lse_HR = flash_attn_varlen_func(
            q=query[:n], k=key_cache, v=value_cache, out=output[:n], cu_seqlens_q=rest.query_start_loc, max_seqlen_q=1,
            seqused_k=rest.seq_lens, max_seqlen_k=rest.max_seq_len, block_table=rest.block_table,
            softmax_scale=self.scale, causal=True, softcap=self.logits_soft_cap, s_aux=self.sinks,
            scheduler_metadata=rest.scheduler_metadata, num_splits=rest.max_num_splits,
            fa_version=self.vllm_flash_attn_version, return_softmax_lse=True,
        )  # fmt: skip
        torch.cuda.current_stream().wait_stream(builder.stream)
        merge_splits(output, lse_HR, groups, builder.partials)
        return output


def requests_shared_decode(config: VllmConfig) -> bool:
    return isinstance(config.additional_config, dict) and bool(config.additional_config.get(SHARED_DECODE))


def obstacle_in_config(config: VllmConfig) -> str:
    """Return why no layer of an engine shares decode; empty if layers can."""
    cache = config.cache_config
    obstacles = {
        "not requested": not requests_shared_decode(config),
        "enable_prefix_caching=False": not cache.enable_prefix_caching,
        "no full CUDA graphs": not config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
        "VLLM_BATCH_INVARIANT=1": envs.VLLM_BATCH_INVARIANT,
        "speculative decoding": config.speculative_config is not None,
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "micro-batches of vLLM (DBO)": config.parallel_config.use_ubatching,
        f"kv_cache_dtype={cache.cache_dtype}": cache.cache_dtype not in ("auto", "bfloat16", "float16"),
    }
    return next((why for why, is_so in obstacles.items() if is_so), "")


def obstacle_in_layers(config: VllmConfig, names: list[str], heads: tuple[int, int, int]) -> str:
    """Return why these layers do not share decode; empty if they can. ``heads``: (H, G, D) of the model's config."""
    for layer in get_layers_from_vllm_config(config, Attention, names).values():
        impl = layer.impl
        obstacles = {
            "sliding window": impl.sliding_window != (-1, -1),
            f"attention type {impl.attn_type}": impl.attn_type != AttentionType.DECODER,
            "ALiBi": impl.alibi_slopes is not None,
            f"FlashAttention {impl.vllm_flash_attn_version}, not 3": impl.vllm_flash_attn_version != 3,
            "its own number of heads": (impl.num_heads, impl.num_kv_heads, impl.head_size) != heads,
            "more than 64 query heads for each key/value head": impl.num_queries_per_kv > BLOCK_M,
        }
        if why := next((why for why, is_so in obstacles.items() if is_so), ""):
            return why
    return ""
