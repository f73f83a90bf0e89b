"""Random batches in verl's format, for benchmarks and tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu


@dataclass(frozen=True)
class Sample:
    """One sequence; ``mask`` is the loss mask of the response (0 at tool tokens), by default all ones."""

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[int] | None = None


def random_group(
    rng: np.random.Generator, vocab_size: int, prompt_length: int, response_lengths: Sequence[int]
) -> list[Sample]:
    """Return a GRPO group: one prompt, one random response of each length."""
    prompt = rng.integers(vocab_size, size=prompt_length).tolist()
    return [Sample(prompt, rng.integers(vocab_size, size=length).tolist()) for length in response_lengths]


def make_batch(samples: Sequence[Sample], seed: int = 0, **settings: Any) -> TensorDict:
    """Return an engine's batch as from verl's V1 trainer, with random old log-probs and advantages.

    ``settings`` are non-tensor fields such as ``max_token_len_per_gpu``; by default all is one micro-batch.
    """
    rng = np.random.default_rng(seed)
    masks = [sample.mask if sample.mask is not None else [1] * len(sample.response) for sample in samples]
    lengths = [len(sample.response) for sample in samples]
    fields = {
        "prompts": _jagged([s.prompt for s in samples], torch.int64),
        "responses": _jagged([s.response for s in samples], torch.int64),
        "input_ids": _jagged([[*s.prompt, *s.response] for s in samples], torch.int64),
        "position_ids": _jagged([range(len(s.prompt) + len(s.response)) for s in samples], torch.int64),
        "response_mask": _jagged(masks, torch.int64),
        "loss_mask": _jagged(masks, torch.int64),
        "old_log_probs": _jagged([rng.normal(-4.5, 0.1, n) for n in lengths], torch.float32),
        "ref_log_prob": _jagged([rng.normal(-4.5, 0.1, n) for n in lengths], torch.float32),
        "advantages": _jagged([np.full(n, rng.normal()) for n in lengths], torch.float32),
    }
    batch = TensorDict(fields, batch_size=len(samples))
    defaults = {
        "use_remove_padding": True,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 1 << 30,
        "use_fused_kernels": False,
        "temperature": 1.0,
        "calculate_entropy": True,
        "global_batch_size": len(samples),
    }
    tu.assign_non_tensor(batch, **{**defaults, **settings})
    return batch


def _jagged(sequences: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    tensors = [torch.tensor(np.asarray(sequence), dtype=dtype) for sequence in sequences]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
