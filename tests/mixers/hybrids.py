"""Tiny models with Gated DeltaNet or Mamba2 layers, and tries for them.

transformers' initial ``A_log`` forgets within a token or two, which would hide a lost state; here it is -5 to -1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.batches import Sample
from benchmarks.shapes import remember

from tests.layout.tries import Batch, batch_of
from tests.support import TINY, VOCAB, group

EXPERTS = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24)
EXPERTS |= {"num_experts": 8, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {"qwen3_next": EXPERTS, "qwen3_5_text": {}, "qwen3_5_moe_text": EXPERTS}

SIZES = {
    **TINY,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "initializer_range": 0.1,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
MAMBA2_KINDS: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {
        **MAMBA2,
        "mamba_d_ssm": 64,
        "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
        **{f"{name}_multiplier": 0.8 for name in ("ssm_in", "ssm_out", "attention_in", "attention_out", "key")},
    },
    "granitemoehybrid": {
        **MAMBA2,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 8,
        "shared_intermediate_size": 24,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
        **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    },
}

SAMPLES = [
    *group(70, [25, 9, 1, 77], 1),
    *group(3, [5, 3], 2),
    *(Sample([1, 2, 3, 4], [5, 6, *tail]) for tail in ([7, 8, 9, 1], [7, 8, 2], [3])),
]


def config_of(kind: str, **overrides: Any) -> Any:
    own = {**SIZES, **KINDS[kind]} if kind in KINDS else {**TINY, "num_hidden_layers": 4, **MAMBA2_KINDS[kind]}
    return transformers.AutoConfig.for_model(kind, **{**own, **overrides})


def save_hybrid(path: Path, kind: str = "qwen3_next", seed: int = 0, **overrides: Any) -> str:
    """Write a float32 checkpoint of a few layers of each type."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **overrides), dtype=torch.float32)
    remember(model).save_pretrained(path)
    return str(path)


def trie_of_depth(depth: int) -> Batch:
    """A few sequences at every depth: shorter than a convolution's width, longer than a chunk of the delta rule."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    pairs: list[tuple[Sequence[int], Sequence[int]]] = [(tokens(3), tokens(4)), (tokens(1), tokens(2))]
    stem = tokens(70)
    for extension in (68, 2, 9)[: depth - 1]:
        pairs += [(stem, tokens(length)) for length in (2, 66, 9)]
        stem = stem + tokens(extension)
    return batch_of(*pairs)


def stretched(batch: Batch, times: int) -> Batch:
    """Repeat every token ``times`` over: the same trie with longer segments."""
    return Batch(
        tuple(tuple(token for token in sequence for _ in range(times)) for sequence in batch.sequences),
        tuple(length * times for length in batch.prompt_lengths),
    )


def samples_of(batch: Batch) -> list[Sample]:
    pairs = zip(batch.sequences, batch.prompt_lengths, strict=True)
    return [Sample(tokens[:length], tokens[length:]) for tokens, length in pairs]
