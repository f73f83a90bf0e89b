"""Tiny models, verl batches and engines, and the reference of all tests: single sequences in float32."""

import atexit
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import transformers
from benchmarks.batches import Sample, make_batch, random_group
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from tensordict import TensorDict
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    VeOmniOptimizerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss, value_loss

from tests.conftest import free_port
from verl_pg_plugin import register
from verl_pg_plugin.config import PrefixGrouperEngineConfig, PrefixGrouperOptions, PrefixGrouperVeOmniEngineConfig
from verl_pg_plugin.engine import plan as plan_module
from verl_pg_plugin.engine.plan import Plan
from verl_pg_plugin.planning import micro_batches
from verl_pg_plugin.planning.activation_policy import ActivationPolicy, CacheWeights
from verl_pg_plugin.skeleton import auto_class

VOCAB = 97
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
FUSED_HEAD = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
# FSDP1 refuses to broadcast weights from a CPU, although gloo can.
_init_utils._check_module_states_for_sync_module_states = lambda states: None
PRECISIONS: dict[str, dict[str, Any]] = {
    name: {"mixed_precision": {"param_dtype": name, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    for name in ("fp32", "bf16", "fp16")
}
"""Fields of an engine config."""


def save_tiny_model(path: Path, model_type: str = "qwen3", seed: int = 0, **overrides: Any) -> str:
    """Write a random float32 causal LM with GQA into ``path``; returns the path."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **overrides})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


def save_value_model(path: Path) -> str:
    """Write a token classifier with one label and the layers of ``save_tiny_model``."""
    layers = save_tiny_model(path / "causal_lm")
    torch.manual_seed(3)
    model = transformers.AutoModelForTokenClassification.from_pretrained(layers, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(path / "value")
    return str(path / "value")


def save_adapter(model: transformers.PreTrainedModel, path: Path, rank: int = 4) -> str:
    """Write a LoRA adapter on every linear layer, with random weights."""
    torch.manual_seed(1)
    config = LoraConfig(TaskType.CAUSAL_LM, r=rank, lora_alpha=2 * rank, target_modules="all-linear", bias="none")
    adapted = get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(path)
    return str(path)


def group(prompt_length: int, response_lengths: Sequence[int], seed: int) -> list[Sample]:
    return random_group(np.random.default_rng(seed), VOCAB, prompt_length, response_lengths)


def critic_batch(samples: list[Sample], **settings: Any) -> TensorDict:
    """``make_batch`` with the fields of verl's critic update."""
    batch, rng = make_batch(samples, **settings), np.random.default_rng(5)
    for name in ("values", "returns"):
        batch[name] = jagged(torch.tensor(rng.normal(0.0, 0.3, len(s.response)), dtype=torch.float32) for s in samples)
    return batch


def jagged(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def join_group_of_one() -> None:
    """Initialize a process group of one, which verl's engines need, unless there is one."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)


def make_engine(
    model_path: str,
    *,
    packed: bool = True,
    padded: bool = False,
    critic: bool = False,
    splits: bool = False,
    strategy: str = "fsdp2",
    engine: dict | None = None,
    model: dict | None = None,
    veomni_dtype: str = "float32",
) -> Any:
    """Build and initialize verl's engine for this machine.

    Args:
        packed: Enable the plugin.
        padded: Use padded groups.
        splits: Split groups that exceed a micro-batch, however short their prefix.
        engine: Fields of the engine config and of its section ``prefix_grouper``.
        model: Fields of the model config.
        veomni_dtype: The dtype of computation on VeOmni, whose config has none: verl's own is "bfloat16".
    """
    join_group_of_one()
    model_type = "value_model" if critic else "language_model"
    register()  # again: verl may have been imported in the middle of an import of the plugin
    engine = dict(engine or {})
    options = {name: engine.pop(name) for name in engine.keys() & PrefixGrouperOptions.__dataclass_fields__.keys()}
    on_veomni = strategy == "veomni"
    config_cls, optimizer_cls, of_strategy = PrefixGrouperEngineConfig, FSDPOptimizerConfig, PRECISIONS["fp32"]
    if on_veomni:
        config_cls, optimizer_cls = PrefixGrouperVeOmniEngineConfig, VeOmniOptimizerConfig
        of_strategy = {"mixed_precision": True, "attn_implementation": "eager", "moe_implementation": "eager"}
    engine_settings = {
        "strategy": strategy,
        "use_prefix_grouper": packed,
        "use_dynamic_bsz": not padded,
        "use_torch_compile": False,
        **of_strategy,
        **engine,
    }
    model_settings = {
        "path": model_path,
        "model_type": model_type,
        "load_tokenizer": False,
        "use_remove_padding": not padded,
        "override_config": {"attn_implementation": "sdpa"},
        "enable_gradient_checkpointing": True,
        **(model or {}),
    }
    built = EngineRegistry.get_engine_cls(model_type, strategy)(
        model_config=HFModelConfig(**model_settings),
        engine_config=config_cls(prefix_grouper=PrefixGrouperOptions(**options), **engine_settings),
        optimizer_config=optimizer_cls(lr=1e-2, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    if on_veomni and veomni_dtype == "float32":
        from verl.workers.engine.veomni import transformer_impl

        built._autocast_dtype = torch.float32
        float32 = partial(transformer_impl.MixedPrecisionConfig, param_dtype="float32")
        with patch.object(transformer_impl, "MixedPrecisionConfig", float32):
            built.initialize()
    else:
        built.initialize()
    if splits:
        split_always(built)
    return built


def split_always(engine: Any, weights: CacheWeights = CacheWeights()) -> None:  # noqa: B008
    """Let an engine split groups that exceed a micro-batch, also if memory holds them, and cache any prefix."""
    plan = engine.plan

    def plan_cheap_micro_batches(data: TensorDict, forward_only: bool) -> Plan:
        cheap = patch.object(micro_batches, "MICRO_BATCH_COST", 4.0)
        never_whole = patch.object(ActivationPolicy, "keeps_whole", lambda *_: False)
        with cheap, never_whole, patch.object(plan_module, "cache_weights", lambda *_: weights):
            return plan(data, forward_only)

    engine.plan = plan_cheap_micro_batches


@contextmanager
def splitting(engine: Any) -> Iterator[None]:
    """Fail unless each mini-batch of ``engine`` in the block splits a group on some rank."""
    run, split_groups = engine.forward_backward_batch, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        split_groups.extend(output["metrics"]["prefix_grouper/split_groups"])
        return output

    with patch.object(engine, "forward_backward_batch", counted):
        yield
    assert split_groups
    assert all(split_groups), "no group was split"


def actor_loss(**overrides: Any) -> Callable:
    """verl's PPO loss with entropy bonus and KL loss, so every output of the engine has a gradient."""
    settings = {
        "strategy": "fsdp2",
        "rollout_n": 1,
        "ppo_micro_batch_size_per_gpu": 1,
        "entropy_coeff": 0.1,
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        **overrides,
    }
    return partial(ppo_loss, config=FSDPActorConfig(**settings))


def is_critics(batch: TensorDict) -> bool:
    return "returns" in batch.keys()  # noqa: SIM118 - a TensorDict iterates over its batch


def default_loss(batch: TensorDict) -> Callable:
    """``actor_loss``, or verl's clipped value loss."""
    critic = FSDPCriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1)
    return partial(value_loss, config=critic) if is_critics(batch) else actor_loss()


def num_calls(run: Callable[[], object]) -> int:
    """Number of Python and C functions that ``run`` calls: a measure of work independent of the machine's load."""
    count = 0

    def profile(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def clone(batch: TensorDict) -> TensorDict:
    """Copy a batch without its tensors, because engines set fields of theirs."""
    return batch.copy()


@dataclass(frozen=True)
class Result:
    """Per-sequence model outputs over the response tokens, full gradients by parameter name, loss and metrics."""

    outputs: dict[str, list[torch.Tensor]]
    gradients: dict[str, torch.Tensor]
    loss: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    def of_rank(self, sequences: Sequence[int]) -> "Result":
        """The outputs of these sequences and the gradients of all; the loss only if these are all sequences."""
        outputs = {name: [values[i] for i in sequences] for name, values in self.outputs.items()}
        has_all = all(len(values) == len(sequences) for values in self.outputs.values())
        return Result(outputs, self.gradients, self.loss if has_all else None)


def response_values(values: torch.Tensor | list[torch.Tensor], batch: TensorDict) -> list[torch.Tensor]:
    """Values at the positions that predict response tokens."""
    lengths = batch["responses"].offsets().diff().tolist()
    sequences = values.unbind() if isinstance(values, torch.Tensor) else values
    return [x.detach()[-length - 1 : -1] for x, length in zip(sequences, lengths, strict=True)]


def full_gradients(module: Any) -> dict[str, torch.Tensor]:
    """Gradients by parameter name without FSDP's prefixes, gathered from all ranks."""
    if not isinstance(module, FullyShardedDataParallel):
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return {name: (g.full_tensor() if isinstance(g, DTensor) else g.detach()).clone() for name, g in grads.items()}
    gradients = {}
    for name, unit in module.named_modules():  # FSDP1 stores gradients in flat parameters
        handle = unit._handle if isinstance(unit, FullyShardedDataParallel) else None
        if handle is None or handle.flat_param.grad is None:
            continue
        gradient = handle.flat_param.grad
        prefix = f"{name}.".lstrip(".").replace("_fsdp_wrapped_module.", "")
        if handle.uses_sharded_strategy:
            shards = [torch.empty_like(gradient) for _ in range(handle.world_size)]
            dist.all_gather(shards, gradient, group=handle.process_group)
            gradient = torch.cat(shards)[: handle.flat_param._unpadded_unsharded_size.numel()]
        for fqn, view in zip(handle.flat_param._fqns, handle._get_unflat_views(gradient), strict=True):
            gradients[prefix + fqn.replace("_fsdp_wrapped_module.", "")] = view.detach().clone()
    return gradients


def infer(engine: Any, batch: TensorDict) -> dict[str, Any]:
    """Run the old log-probs path; returns ``model_output`` and ``metrics``."""
    with engine.eval_mode():
        return engine.infer_batch(clone(batch))


def update(engine: Any, batch: TensorDict, loss: Callable | None = None, **settings: Any) -> Result:
    """Run an update without an optimizer step; ``settings`` of the batch such as ``return_model_output``."""
    data = clone(batch)
    tu.assign_non_tensor(data, **settings)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, loss or default_loss(batch))
        scaler = getattr(engine, "scaler", None)  # stock verl's VeOmni engine has no such attribute
        scale = scaler.get_scale() if scaler else 1.0  # of the loss, under fp16
        gradients = {name: gradient / scale for name, gradient in full_gradients(engine.module).items()}
    outputs = {name: response_values(values, batch) for name, values in output["model_output"].items()}
    return Result(outputs, gradients, sum(output["loss"]), output["metrics"])


def old_outputs(engine: Any, batch: TensorDict) -> dict[str, list[torch.Tensor]]:
    inferred = infer(engine, batch)["model_output"]
    return {name: response_values(values, batch) for name, values in inferred.items()}


def run_engine(engine: Any, batch: TensorDict, loss: Callable | None = None) -> Result:
    """Outputs of the old log-probs path and gradients of the update path."""
    outputs = old_outputs(engine, batch)
    return replace(update(engine, batch, loss), outputs=outputs)


@lru_cache(maxsize=4)
def load_reference(from_pretrained: Callable, model_path: str, **options: Any) -> Any:
    """Load a stock model once for the tests that share its checkpoint."""
    return from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager", **options)


def run_reference(
    model_path: str,
    batch: TensorDict,
    loss: Callable | None = None,
    adapter: str | None = None,
    cut: Sequence[Sequence[int]] | None = None,
    of_logits: Callable | None = None,
    **model_options: Any,
) -> Result:
    """Run single unpadded sequences through the stock transformers model, with one loss over all.

    Args:
        adapter: Path of a LoRA adapter.
        cut: Sequences of each micro-batch, on which some losses depend.
        of_logits: verl's function of a student's logits.
    """
    images = batch.get("multi_modal_inputs")
    if is_critics(batch):
        classes = transformers.AutoModelForTokenClassification
        model_options = {"num_labels": 1, **model_options}
    elif images is not None:
        classes = transformers.AutoModelForImageTextToText
        images = [getattr(of, "data", of) for of in images]
    else:
        trusted = {name: value for name, value in model_options.items() if name == "trust_remote_code"}
        classes = auto_class(transformers.AutoConfig.from_pretrained(model_path, **trusted))
    load = load_reference.__wrapped__ if adapter else load_reference  # an adapter changes the model
    model = load(classes.from_pretrained, model_path, **model_options)
    model.zero_grad()
    if adapter:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    dtype = next(model.parameters()).dtype
    temperatures = torch.as_tensor(batch["temperature"], dtype=dtype).reshape(-1).expand(len(batch)).tolist()
    rows: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": [], "sum_pi_squared": [], "values": []}
    for i, (ids, t) in enumerate(zip(batch["input_ids"].unbind(), temperatures, strict=True)):
        shown = {name: x for name, x in images[i].items() if name != "images_seqlens"} if images else {}
        if images:
            shown["position_ids"] = batch["position_ids"].unbind()[i].unsqueeze(-2)
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False, **shown).logits.squeeze(0)
        if is_critics(batch):
            rows["values"].append(logits.squeeze(-1))
            continue
        logits = logits / t
        log_p = logits.log_softmax(-1)
        rows["log_probs"].append(log_p.gather(-1, torch.cat([ids[1:], ids[:1]]).unsqueeze(-1)).squeeze(-1))
        rows["entropy"].append(verl_F.entropy_from_logits(logits))
        rows["sum_pi_squared"].append(log_p.exp().square().sum(-1))
        if of_logits:
            outputs = of_logits(student_logits=logits[None], data=tu.index_select_tensor_dict(batch, [i]))
            for name, values in outputs.items():
                rows.setdefault(name, []).append(values.squeeze(0))
    flags = {"entropy": "calculate_entropy", "sum_pi_squared": "calculate_sum_pi_squared"}
    left_out = {name for name, flag in flags.items() if not tu.get_non_tensor_data(batch, flag, default=False)}
    left_out |= {"log_probs"} if tu.get_non_tensor_data(batch, "distillation_only", default=False) else set()
    rows = {name: values for name, values in rows.items() if values and name not in left_out}
    result = learned(model, rows, batch, loss, cut)
    if not images or not any(images):
        return result
    # In packed mode, one image gives every weight of the vision encoder a gradient.
    unused = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad and p.grad is None}
    return replace(result, gradients=result.gradients | unused)


def learned(
    model: Any,
    rows: dict[str, list[torch.Tensor]],
    batch: TensorDict,
    loss: Callable | None = None,
    cut: Sequence[Sequence[int]] | None = None,
) -> Result:
    """Backpropagate the loss of a model's outputs ``rows``; metrics are those of the last micro-batch."""
    value, metrics = torch.zeros((), dtype=next(model.parameters()).dtype), {}
    for indices in cut or [range(len(batch))]:
        data = tu.index_select_tensor_dict(batch, list(indices)) if cut else clone(batch)
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(batch["loss_mask"].values().sum()))
        outputs = {name: jagged(of_name[i] for i in indices) for name, of_name in rows.items()}
        of_part, metrics = (loss or default_loss(batch))(model_output=outputs, data=data)
        value = value + of_part
    value.backward()
    outputs = {name: response_values(of_name, batch) for name, of_name in rows.items()}
    return Result(outputs, full_gradients(model), value.item(), metrics)


def assert_same(actual: Result, expected: Result) -> None:
    """Compare per token and per parameter, with a tolerance of 1e-5 (float64: 1e-10).

    The tolerance is relative to the output's magnitude, at least 1, or to the gradient's largest magnitude.
    """
    assert actual.outputs.keys() == expected.outputs.keys()
    tensors = [*actual.gradients.values(), *(row for rows in actual.outputs.values() for row in rows)]
    tolerance = 1e-10 if all(x.dtype == torch.float64 for x in tensors) else 1e-5
    for name, rows in actual.outputs.items():
        for row, (got, want) in enumerate(zip(rows, expected.outputs[name], strict=True)):
            error, bound = (got.double() - want.double()).abs(), tolerance * want.double().abs().clamp(min=1.0)
            where = f"{name}, sequence {row}"
            assert (error <= bound).all(), f"{where}: off by {error.max():.3g} at token {int(error.argmax())}"
    if actual.loss is not None and expected.loss is not None:
        assert abs(actual.loss - expected.loss) <= tolerance * max(1.0, abs(expected.loss)), "the loss"
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, want in expected.gradients.items():
        error = (actual.gradients[name].double() - want.double()).abs().max()
        bound = tolerance * want.double().abs().max()
        assert error <= bound, f"gradient of {name}: off by {error:.3g}, largest {want.abs().max():.3g}"


def check_outputs(engine: Any, path: str, batch: TensorDict, adapter: str | None = None) -> dict[str, Any]:
    """Compare the outputs of the old log-probs path with single sequences and return them."""
    outputs = old_outputs(engine, batch)
    assert_same(Result(outputs, {}), Result(run_reference(path, batch, adapter=adapter).outputs, {}))
    return outputs


def check_exact(
    engine: Any,
    path: str,
    batch: TensorDict,
    loss: Callable | None = None,
    sequences: Sequence[int] | None = None,
    splits: bool = False,
    expected: Result | None = None,
    **reference: Any,
) -> Result:
    """Compare outputs of both paths, loss and gradients of ``batch`` with single sequences.

    Args:
        sequences: Indices of this rank's sequences; None for all.
        splits: Require that groups are split.
        expected: Result of ``run_reference``, else computed with ``reference``.
    """
    expected = expected or run_reference(path, batch, loss, **reference)
    mine = batch
    if sequences is not None:
        expected, mine = expected.of_rank(sequences), tu.index_select_tensor_dict(batch, list(sequences))
    with splitting(engine) if splits else nullcontext():
        outputs = old_outputs(engine, mine)
        got = update(engine, mine, loss, return_model_output=True)
    assert_same(got, expected)
    assert_same(replace(got, outputs=outputs), expected)
    return got
