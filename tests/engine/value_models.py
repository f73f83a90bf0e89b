"""Tiny value models, verl's critic engine and loss, and the values of every sequence alone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tensordict import TensorDict
from verl.workers.config import FSDPCriticConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import value_loss

from tests.support import Result, assert_same, learned, make_engine, run_engine, save_tiny_model
from verl_pg_plugin.synthetic import Sample, make_batch


def save_value_model(path: Path, model_type: str = "qwen3") -> str:
    """A token classifier with one label on the trunk of ``save_tiny_model``, written by transformers."""
    trunk = save_tiny_model(path / "causal_lm", model_type)
    torch.manual_seed(3)
    model = transformers.AutoModelForTokenClassification.from_pretrained(trunk, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(path / "value")
    return str(path / "value")


def make_value_engine(
    path: str,
    *,
    sharing: bool = True,
    padded: bool = False,
    model: dict | None = None,
    options: dict | None = None,
) -> Any:
    """verl's registered value engine, initialised; ``options`` are of its config."""
    return make_engine(
        path,
        packed=sharing,
        padded=padded,
        engine=options,
        model={"model_type": "value_model", **(model or {})},
        engine_cls=EngineRegistry.get_engine_cls("value_model", "fsdp2"),
    )


def critic_batch(samples: list[Sample], **settings: Any) -> TensorDict:
    """``make_batch`` with the fields of verl's critic update."""
    batch = make_batch(samples, **settings)
    rng = np.random.default_rng(5)
    lengths = [len(sample.response) for sample in samples]
    for name in ("values", "returns"):
        rows = [torch.tensor(rng.normal(0.0, 0.3, n), dtype=torch.float32) for n in lengths]
        batch[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return batch


def critic_loss() -> Callable:
    """verl's clipped value loss."""
    return partial(value_loss, config=FSDPCriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1))


def run_value_reference(path: str, batch: TensorDict) -> Result:
    """Values and gradients of every sequence alone, unpadded, through transformers' own classifier."""
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    rows = [model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :, 0] for ids in batch["input_ids"].unbind()]
    return learned(model, {"values": rows}, batch, critic_loss())


def check_exact_values(engine: Any, path: str, batch: TensorDict) -> None:
    """Values and gradients of ``batch`` are those of every sequence alone."""
    assert_same(run_engine(engine, batch, critic_loss()), run_value_reference(path, batch))
