"""The rule for low precision, an error against float32 of at most 1.1 times stock rmpad's; and float64."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tensordict import TensorDict
from verl.utils.torch_dtypes import PrecisionType

from tests.support import PRECISIONS, Result, run_engine
from verl_pg_plugin.engine import verify
from verl_pg_plugin.engine.micro_batch import MiniBatch

BF16 = PRECISIONS["bf16"]
FLASH = {"override_config": {"attn_implementation": "flash_attention_2"}}
"""Fields of a model config for stock rmpad on a GPU."""
GPU_SIZES = {
    "vocab_size": 98,  # even, without padding: FSDP2 reads padded parameters before verl's offload has finished
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "initializer_range": 0.05,
}
POOLED = 4096
"""Parameters with fewer elements are compared together, because errors of few numbers vary by chance."""
FACTOR = 1.1
SMOOTH_LOSS = {
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), 1e4),
    "kl_loss_type": "mse",
}
"""Settings for ``actor_loss`` without thresholds: one token that crosses a threshold dominates a gradient's error."""
PLAUSIBLE = 0.1
"""A relative error of stock rmpad above this is a fault, not rounding."""


def errors(result: Result, reference: Result) -> dict[str, float]:
    """Relative norm of the difference from float32 of each output and each gradient."""
    pairs = {name: (torch.cat(rows), torch.cat(reference.outputs[name])) for name, rows in result.outputs.items()}
    small = []
    for name, want in reference.gradients.items():
        pair = (result.gradients[name].flatten(), want.flatten())
        if want.numel() < POOLED:
            small.append(pair)
        else:
            pairs[name] = pair
    if small:
        pairs["small parameters"] = tuple(map(torch.cat, zip(*small, strict=True)))
    return {name: ((got.cpu().float() - want).norm() / want.norm()).item() for name, (got, want) in pairs.items()}


def error_of(engine: Any, batch: TensorDict, reference: Result, loss: Callable | None = None) -> dict[str, float]:
    return errors(run_engine(engine, batch, loss), reference)


def pooled(batches: list[dict[str, float]]) -> dict[str, float]:
    """Root mean square of the errors of several batches."""
    return {name: (sum(errors[name] ** 2 for errors in batches) / len(batches)) ** 0.5 for name in batches[0]}


def assert_no_worse(actual: dict[str, float], stock: dict[str, float]) -> None:
    faults = {name: error for name, error in stock.items() if not error < PLAUSIBLE}
    assert not faults, f"stock rmpad itself is wrong: {faults}"
    worse = [
        f"{name}: {error / stock[name]:.3f} times the error of stock rmpad"
        for name, error in actual.items()
        if error > FACTOR * stock[name]
    ]
    assert not worse, "; ".join(worse)


@contextmanager
def in_float64() -> Iterator[None]:
    """Build and run engines and references in float64, for sums that nearly cancel in float32."""
    auto_classes = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    with ExitStack() as stack:
        for auto in auto_classes:
            stack.enter_context(patch.object(auto, "from_pretrained", partial(_load, auto, auto.from_pretrained)))
        stack.enter_context(patch.object(PrecisionType, "to_dtype", staticmethod(lambda precision: torch.float64)))
        stack.enter_context(patch.object(MiniBatch, "autocast", lambda batch: nullcontext()))
        for of_dtype in (verify._ROUNDING_STEP, verify._LEAST_TOLERANCE):
            stack.enter_context(patch.dict(of_dtype, {torch.float64: of_dtype[torch.float32]}))
        yield


def _load(auto: Any, stock: Any, pretrained_model_name_or_path: str, **options: Any) -> Any:
    config = options.get("config") or transformers.AutoConfig.from_pretrained(pretrained_model_name_or_path)
    if "attn_implementation" in options:
        config._attn_implementation = options["attn_implementation"]
    of_float32 = auto._model_mapping[type(config)]
    model = getattr(float64_copy(of_float32.__module__), of_float32.__name__)(config).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch's grouped product has no float64
    model.load_state_dict(stock(pretrained_model_name_or_path, dtype=torch.float32).state_dict())
    return model


def float64_copy(name: str) -> ModuleType:
    """Copy a module of transformers, with casts to float64 in place of float32.

    Gated DeltaNet pads segments to chunks and loops over their tokens; chunks of 16 take a third of the time of 64.
    """
    copy_name = f"{name}_float64"
    stock = importlib.import_module(name)
    if copy_name not in sys.modules:
        text = Path(str(stock.__file__)).read_text()
        text = re.sub(r"torch\.float(32)?\b", "torch.float64", text).replace(".float()", ".double()")
        text = re.sub(r"(chunk_size(: int)? ?= ?)64\b", r"\g<1>16", text)
        copy = ModuleType(copy_name)
        copy.__file__, copy.__package__ = stock.__file__, stock.__package__
        sys.modules[copy_name] = copy
        exec(compile(text, str(stock.__file__), "exec"), copy.__dict__)
    return sys.modules[copy_name]
