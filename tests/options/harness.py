"""Run a case of the matrix in packed mode and compare it with single sequences."""

import json
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.batches import Sample, make_batch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from tests import support
from tests.options.option import Case
from tests.options.table import BUDGET, SAMPLES
from verl_pg_plugin.engine.engine import SharedPrefixEngine

HOW_TO_CUT = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_fused_kernels")


@dataclass(frozen=True)
class Checkpoint:
    """A tiny model on disk, and a LoRA adapter on each of its linear layers."""

    model: str
    adapter: str

    @classmethod
    def save(cls, folder: Path, **sizes: Any) -> "Checkpoint":
        path = support.save_tiny_model(folder / "model", **sizes)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return cls(path, support.save_adapter(model, folder / "adapter"))

    def adapter_of(self, case: Case) -> str | None:
        return self.adapter if case.settings("model").get("lora_rank") else None


@dataclass(frozen=True)
class Engines:
    """Packed engines and references by their settings, which many cases share."""

    checkpoint: Checkpoint
    base: dict[str, Any] = field(default_factory=dict)
    built: dict[str, Any] = field(default_factory=dict)
    references: dict[str, support.Result] = field(default_factory=dict)

    def of(self, case: Case, **settings: Any) -> Any:
        """Return the engine of a case; ``settings`` are for ``make_engine``."""
        engine, model = {**self.base, **case.settings("engine")}, case.settings("model")
        strategy = engine.pop("strategy", "fsdp2")
        key = json.dumps([strategy, engine, model, settings])
        if key not in self.built:
            if adapter := self.checkpoint.adapter_of(case):
                model["lora_adapter_path"] = adapter
            settings = {"splits": settings.get("packed", True), "engine": engine, **settings}
            settings["model"] = {**settings.get("model", {}), **model}
            self.built[key] = support.make_engine(self.checkpoint.model, strategy=strategy, **settings)
        return self.built[key]

    def reference_of(self, case: Case, batch: TensorDict, seed: int = 0) -> support.Result:
        """Return the result of single sequences; ``seed`` identifies their samples."""
        settings = {name: value for name, value in case.settings("batch").items() if name not in HOW_TO_CUT}
        adapter = self.checkpoint.adapter_of(case)
        key = str((settings, case.settings("loss"), adapter, seed))
        if key not in self.references:
            self.references[key] = support.run_reference(self.checkpoint.model, batch, loss_of(case), adapter=adapter)
        return self.references[key]


def batch_of(
    case: Case, samples: Sequence[Sample] = SAMPLES, scale: int = 1, make: Callable[..., TensorDict] = make_batch
) -> TensorDict:
    """Return the samples with the settings of a case; the token budget is multiplied by ``scale``."""
    settings = {"max_token_len_per_gpu": BUDGET, **case.settings("batch")}
    settings["max_token_len_per_gpu"] *= scale
    batch = make(samples, **settings)
    for name, value in settings.items():
        if isinstance(value, torch.Tensor):
            batch[name] = value
    return batch


def loss_of(case: Case) -> Callable[..., tuple[torch.Tensor, dict[str, Any]]]:
    """verl's PPO loss; where the engine hands out sums of squared probabilities, they carry gradient too."""
    policy_loss = support.actor_loss(**case.settings("loss"))

    def loss(model_output: dict, data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        value, metrics = policy_loss(model_output=model_output, data=data, dp_group=dp_group)
        if tu.get_non_tensor_data(data, "calculate_sum_pi_squared", default=False):
            squares = no_padding_2_padding(model_output["sum_pi_squared"], data)
            mask = data["response_mask"].to_padded_tensor(0).to(bool)
            value = value + agg_loss(squares, mask, "token-mean", data["dp_size"], data["batch_num_tokens"])
        return value, metrics

    return loss


def run_on_this_rank(case: Case, engine: Any, everything: TensorDict) -> support.Result:
    """Run this rank's samples; a case of split groups must split one on some rank."""
    mine = tu.index_select_tensor_dict(everything, samples_of_rank(case, engine, everything))
    if case.splits and tu.get_non_tensor_data(mine, "use_dynamic_bsz", default=True):
        budget = tu.get_non_tensor_data(mine, "max_token_len_per_gpu", default=None)
        ranks = engine.ulysses_sequence_parallel_size  # which share one budget
        tu.assign_non_tensor(mine, max_token_len_per_gpu=-(-budget // ranks))
    shares = isinstance(engine, SharedPrefixEngine)
    with support.splitting(engine) if case.splits and shares else nullcontext():
        result = support.run_engine(engine, mine, loss_of(case))
    optional = {"entropy": "calculate_entropy", "sum_pi_squared": "calculate_sum_pi_squared"}
    expected = {name for name, flag in optional.items() if tu.get_non_tensor_data(mine, flag, default=False)}
    assert result.outputs.keys() == {"log_probs", *expected}
    assert any(gradient.any() for gradient in result.gradients.values())
    return result


def samples_of_rank(case: Case, engine: Any, everything: TensorDict) -> list[int]:
    """Indices of this data-parallel rank's samples: strided, which cuts groups, or contiguous, to split groups."""
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    if case.splits:
        return np.array_split(np.arange(len(everything)), size)[rank].tolist()
    return list(range(rank, len(everything), size))


def assert_exact(case: Case, engines: Engines) -> None:
    """Outputs, loss and gradients of a case on this rank match single sequences."""
    engine, everything = engines.of(case), batch_of(case)
    expected = engines.reference_of(case, everything).of_rank(samples_of_rank(case, engine, everything))
    support.assert_same(run_on_this_rank(case, engine, everything), expected)


def errors_of(rank: int, cases: Iterable[Case], check: Callable[[Case], None]) -> list[str]:
    """Return the traceback of each case on this rank, or ''."""
    errors = []
    for case in cases:
        try:
            check(case)
            errors.append("")
        except Exception:
            errors.append(f"rank {rank}: {traceback.format_exc()}")
    return errors


def by_case(cases: Sequence[Case], by_rank: Sequence[list[str]]) -> dict[str, str]:
    """Return the tracebacks of all ranks by case."""
    return {str(case): "\n".join(filter(None, errors)) for case, *errors in zip(cases, *by_rank, strict=True)}
