"""Settings of verl's that the run reads late: counts, numbers, switches, and words out of a short list.

Hydra takes any value for most of them; ``rollout.n=0`` or ``adv_estimator=grop`` fail minutes later in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from math import isfinite

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.utils.import_utils import import_external_libs
from verl.utils.tracking import Tracking
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_pg_plugin.config.before_ray.reading import without_followers, words, wrong
from verl_pg_plugin.config.keys import ACTOR, CRITIC, MODEL, REF, ROLLOUT, group_keeping
from verl_pg_plugin.config.keys import TRAINER_PREFIX as PREFIX
from verl_pg_plugin.config.options import not_boolean
from verl_pg_plugin.config.violation import Violation

__all__ = ["value_violations"]

BATCH = "data.train_batch_size"
COUNTS = (
    BATCH,
    "data.max_prompt_length",
    "data.max_response_length",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.tensor_model_parallel_size",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
)
"""Positive integers."""

OPTIONAL_COUNTS = (
    "data.gen_batch_size",
    "trainer.total_training_steps",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{REF}.log_prob_micro_batch_size_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    f"{REF}.ulysses_sequence_parallel_size",
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size",
    f"{CRITIC}.ppo_infer_max_token_len_per_gpu",
)
"""Positive integers where they are set."""

NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    f"{ROLLOUT}.temperature": ("a number above 0: log-probs are divided by it", lambda value: value > 0),
    f"{ROLLOUT}.gpu_memory_utilization": ("a share above 0 and up to 1", lambda value: 0 < value <= 1),
    f"{ACTOR}.optim.lr": ("a number of at least 0", lambda value: value >= 0),
    f"{ACTOR}.clip_ratio": ("a number of at least 0", lambda value: value >= 0),
}

SWITCHES = (
    f"{ACTOR}.use_kl_loss",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.shuffle",
    f"{REF}.log_prob_use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz",
    f"{MODEL}.use_fused_kernels",
    f"{MODEL}.enable_gradient_checkpointing",
    f"{MODEL}.trust_remote_code",
    "algorithm.use_kl_in_reward",
    "data.filter_overlong_prompts",
    "trainer.balance_batch",
    "trainer.use_v1",
    "trainer.val_before_train",
)
"""Booleans: Hydra reads ``no`` and ``off`` as words, and a word is true."""

TRAINER_MODE = "trainer.v1.trainer_mode"
KL_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
VERLS_TRAINERS = ("sync", "colocate_async", "separate_async")
RESUME_MODES = ("disable", "auto", "resume_path")
KL_CONTROLLERS = ("fixed", "adaptive")

LOGGER_MODULES = {"tracking": "wandb", "vemlp_wandb": "volcengine_ml_platform", "tensorboard": "tensorboard"}
"""What a logger of verl's imports, where its name is not the module's."""
ALWAYS_THERE = ("console", "file", "rl_insight")


def value_violations(config: DictConfig) -> Iterator[Violation]:
    """Values that verl, Ray or a worker would refuse later."""
    yield from without_followers([*_counts(config), *_switches(config)])
    for key, (kind, fits) in NUMBERS.items():
        value = OmegaConf.select(config, key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        if value is not None and not (number and fits(value)):
            yield wrong(config, "number", key, f"is not {kind}", f"{key}=<{kind.partition(':')[0]}>")
    yield from _words(config)
    yield from _loggers(config)


def _counts(config: DictConfig) -> Iterator[Violation]:
    for key in (*COUNTS, *OPTIONAL_COUNTS):
        value = OmegaConf.select(config, key)
        if value is None and key in OPTIONAL_COUNTS:
            continue
        if key == BATCH and value == 0 and OmegaConf.select(config, "async_training") is not None:
            continue  # what verl's fully async recipe demands: it streams, and has no batches
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield wrong(config, "count", key, "is not a positive integer", f"{key}=<positive integer>")


def _switches(config: DictConfig) -> Iterator[Violation]:
    for key in SWITCHES:
        value = OmegaConf.select(config, key)
        if value is not None and (objection := not_boolean(value)):
            yield wrong(config, "switch", key, objection[0], f"{key}={objection[1]}")


def _words(config: DictConfig) -> Iterator[Violation]:
    import_external_libs(OmegaConf.select(config, f"{MODEL}.external_lib"))  # it registers losses and estimators
    choices: dict[str, tuple[str, ...]] = {
        "algorithm.adv_estimator": tuple(ADV_ESTIMATOR_REGISTRY),
        f"{ACTOR}.policy_loss.loss_mode": tuple(POLICY_LOSS_REGISTRY),
        f"{ROLLOUT}.name": tuple(RolloutReplicaRegistry._registry),
        "trainer.resume_mode": RESUME_MODES,
    }
    mode = str(OmegaConf.select(config, TRAINER_MODE))
    if OmegaConf.select(config, "trainer.use_v1") is True and mode.removeprefix(PREFIX) not in VERLS_TRAINERS:
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY  # seconds; it knows trainers of other plugins

        choices[TRAINER_MODE] = (*TRAINER_REGISTRY, *map(group_keeping, TRAINER_REGISTRY))
    if OmegaConf.select(config, f"{ACTOR}.use_kl_loss") is True:
        choices[f"{ACTOR}.kl_loss_type"] = (*KL_ESTIMATES, *(f"{name}+" for name in KL_ESTIMATES))
    if OmegaConf.select(config, "algorithm.use_kl_in_reward") is True:
        choices["algorithm.kl_penalty"] = (*KL_ESTIMATES, *(f"{name}+" for name in KL_ESTIMATES))
        choices["algorithm.kl_ctrl.type"] = KL_CONTROLLERS
    for key, known in choices.items():
        # A default of verl's may be an enum, whose value is the word.
        value = OmegaConf.select(config, key)
        if getattr(value, "value", value) not in known:
            yield wrong(config, "word", key, f"is unknown; the values are {', '.join(known)}", f"{key}=<one of these>")


def _loggers(config: DictConfig) -> Iterator[Violation]:
    key = "trainer.logger"
    known = (*Tracking.supported_backend, "tracking")
    for name in words(config, key):
        if name not in known:
            why = f"{name} is no logger of verl's; there are {', '.join(known)}"
            yield wrong(config, "logger", key, why, f"{key}=[console,file]")
        elif name not in ALWAYS_THERE and find_spec(module := LOGGER_MODULES.get(name, name)) is None:
            without = ",".join(other for other in words(config, key) if other != name) or "console"
            fix = f"pip install {module}, or {key}=[{without}]"
            yield wrong(config, "logger", key, f"{name} needs the package {module}, which is not installed", fix)
