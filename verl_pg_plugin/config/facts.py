"""What one engine is asked to do, read from the trainer's config or from the configs that the engine gets.

The rules look at nothing else, so both doors say the same: the validators in front of Ray
(``Facts.from_hydra``), and the engine in its worker (``Facts.from_engine``), where verl's own entry point
meets them first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic
from verl.utils.device import get_device_name

from verl_pg_plugin.config.keys import ACTOR, CRITIC, CRITIC_MODEL, MODEL, OPTIONS, REF, ROLLOUT, USE_PREFIX_GROUPER
from verl_pg_plugin.config.mode import Mode, mode_by_flags
from verl_pg_plugin.config.options import OPTION_NAMES
from verl_pg_plugin.config.violation import Setting

__all__ = ["SOURCES", "Facts", "Role", "effective_sp_size", "read_setting", "runs_critic"]


class Role(Enum):
    """Whose engine it is; the value is the role's section in the trainer's config."""

    ACTOR = ACTOR
    REF = REF
    CRITIC = CRITIC

    @property
    def model(self) -> str:
        """Section of the model that the engine runs."""
        return CRITIC_MODEL if self is Role.CRITIC else MODEL

    @property
    def engine(self) -> str:
        """Section of the engine config."""
        return f"{self.value}.{'fsdp' if self is Role.CRITIC else 'fsdp_config'}"


@dataclass(frozen=True)
class Source:
    """Where a fact stands.

    Args:
        keys: in the trainer's config, for all roles or by role, with ``{role}``, ``{engine}`` and ``{model}`` for the
            sections of the role.
        engine: reads it from the engine config and the model config; None where neither holds it. An engine cannot
            tell which of several keys its value was typed at, so it names them all.
        default: value where no key of the role holds it.
        wins: picks the key that verl lets win from those of the trainer's config.
    """

    keys: tuple[str, ...] | Mapping[Role, tuple[str, ...]]
    engine: Callable[[Any, Any], Any] | None = None
    default: Any = None
    wins: Callable[[tuple[Setting, ...]], tuple[Setting, ...]] = lambda settings: settings

    def keys_of(self, role: Role) -> tuple[str, ...]:
        keys = self.keys.get(role, ()) if isinstance(self.keys, Mapping) else self.keys
        return tuple(key.format(role=role.value, engine=role.engine, model=role.model) for key in keys)


_SP_SIZE = "ulysses_sequence_parallel_size"


def _of_actor_and_ref(*keys: str, critic: tuple[str, ...] = ()) -> dict[Role, tuple[str, ...]]:
    return {Role.ACTOR: keys, Role.REF: keys, Role.CRITIC: critic}


def _deprecated_wins_above_one(sizes: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """verl lets its deprecated key, the first, win for the actor and the reference policy."""
    return sizes[:1] if (sizes[0].value or 1) > 1 else sizes[-1:]


def _option(name: str, engine: Any, model: Any) -> Any:
    return getattr(engine.prefix_grouper, name)


SOURCES: dict[str, Source] = {
    **{name: Source((f"{OPTIONS}.{name}",), partial(_option, name)) for name in OPTION_NAMES},
    # What the engine is told.
    "strategy": Source(("{role}.strategy",), lambda engine, model: engine.strategy),
    "use_orig_params": Source(("{engine}.use_orig_params",), lambda engine, model: engine.use_orig_params),
    "param_dtype": Source(
        ("{engine}.mixed_precision.param_dtype",),
        lambda engine, model: (engine.mixed_precision or {}).get("param_dtype"),
    ),
    "use_dynamic_bsz": Source(
        # verl's trainers leave the critic's engine at its default, whatever the config says.
        {Role.ACTOR: ("{role}.use_dynamic_bsz",), Role.REF: ("{role}.log_prob_use_dynamic_bsz",)},
        lambda engine, model: engine.use_dynamic_bsz,
        default=True,
    ),
    "sp_size": Source(
        _of_actor_and_ref(f"{{role}}.{_SP_SIZE}", f"{{engine}}.{_SP_SIZE}", critic=(f"{{engine}}.{_SP_SIZE}",)),
        lambda engine, model: engine.ulysses_sequence_parallel_size,
        wins=_deprecated_wins_above_one,
    ),
    "pad_to_length": Source(
        _of_actor_and_ref("{role}.pad_to_length", "{engine}.pad_to_length", critic=("{engine}.pad_to_length",)),
        lambda engine, model: engine.pad_to_length,
    ),
    "qat": Source(("{engine}.qat.enable",), lambda engine, model: engine.qat.enable),
    "use_remove_padding": Source(("{model}.use_remove_padding",), lambda engine, model: model.use_remove_padding),
    "use_fused_kernels": Source(("{model}.use_fused_kernels",), lambda engine, model: model.use_fused_kernels),
    "fused_backend": Source(
        ("{model}.fused_kernel_options.impl_backend",),
        lambda engine, model: (model.fused_kernel_options or {}).get("impl_backend"),
    ),
    "activation_offload": Source(
        ("{model}.enable_activation_offload",), lambda engine, model: model.enable_activation_offload
    ),
    "use_liger": Source(("{model}.use_liger",), lambda engine, model: model.use_liger),
    "tiled_mlp": Source(("{model}.tiled_mlp.enabled",), lambda engine, model: (model.tiled_mlp or {}).get("enabled")),
    "trust_remote_code": Source(("{model}.trust_remote_code",), lambda engine, model: model.trust_remote_code),
    "gradient_checkpointing": Source(
        ("{model}.enable_gradient_checkpointing",), lambda engine, model: model.enable_gradient_checkpointing
    ),
    "attn_implementation": Source(
        ("{model}.override_config.attn_implementation",),
        lambda engine, model: (model.override_config or {}).get("attn_implementation"),
    ),
    "mtp": Source(("{model}.mtp.enable",), lambda engine, model: model.mtp is not None and model.mtp.enable),
    # What only the trainer knows.
    "actor_flag": Source((USE_PREFIX_GROUPER,)),
    "actor_qat": Source({Role.ACTOR: ("{role}.qat.enable",)}),
    "balance_batch": Source({Role.ACTOR: ("trainer.balance_batch",)}),
    "context_parallel_size": Source(
        _of_actor_and_ref("{role}.megatron.context_parallel_size", "{role}.torchtitan.context_parallel_size")
    ),
    "critic_sp_size": Source({Role.CRITIC: (f"{{role}}.{_SP_SIZE}",)}),
    "distillation": Source({Role.ACTOR: ("distillation.enabled",)}),
    "engine_config_target": Source(("{engine}._target_",)),
    "engine_flag": Source(("{engine}.use_prefix_grouper",)),
    "micro_batch_size": Source(
        {
            Role.ACTOR: ("{role}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
            Role.REF: ("{role}.log_prob_micro_batch_size_per_gpu",),
        }
    ),
    "old_log_prob_dynamic_bsz": Source({Role.ACTOR: (f"{ROLLOUT}.log_prob_use_dynamic_bsz",)}),
    "role_fused_kernels": Source({Role.ACTOR: ("{role}.use_fused_kernels",)}),
    "role_remove_padding": Source(_of_actor_and_ref("{role}.use_remove_padding")),
    "rollout_n": Source((f"{ROLLOUT}.n",)),
    "sum_pi_squared": Source({Role.ACTOR: ("{role}.calculate_sum_pi_squared",)}),
}
"""Every fact by name."""


@dataclass(frozen=True)
class Facts:
    """What one engine is asked to do, and on what.

    Attributes:
        role: whose engine it is.
        mode: how its sequences enter the model.
        device_name: device type as verl names it, such as "cuda" or "cpu".
        settings: by fact, the entries that hold it, with their values; those of the trainer alone are missing where
            an engine was asked.
        values: by fact, the value in force, None where it is unknown.
        hf_config: config of the checkpoint, overrides applied; None while it has not been read.
    """

    role: Role
    mode: Mode
    device_name: str
    settings: Mapping[str, tuple[Setting, ...]]
    values: Mapping[str, Any]
    hf_config: Any = None

    @classmethod
    def from_hydra(cls, config: DictConfig, role: Role, hf_config: Any = None) -> Facts:
        """Facts of the engine that verl will build for ``role``.

        Args:
            config: the composed trainer config, every interpolation resolvable.
            role: one that the run has.
            hf_config: config of its checkpoint, overrides applied, if it could be read.

        Raises:
            omegaconf.errors.OmegaConfBaseException: when an interpolation cannot be resolved.
        """
        settings, values = {}, {}
        for name, source in SOURCES.items():
            found = tuple(read_setting(config, key) for key in source.keys_of(role))
            settings[name] = source.wins(found) if found else found
            values[name] = settings[name][0].value if found else source.default
        mode = mode_by_flags(values["actor_flag"], values["use_remove_padding"])
        return cls(role, mode, get_device_name(), settings, values, hf_config)

    @classmethod
    def from_engine(cls, engine_config: Any, model_config: Any) -> Facts:
        """Facts that an engine finds in its configs.

        Args:
            engine_config: a ``PrefixGrouperEngineConfig``.
            model_config: verl's ``HFModelConfig``.
        """
        if model_config.model_type == "value_model":
            role = Role.CRITIC
        else:
            role = Role.REF if engine_config.forward_only else Role.ACTOR
        values = {name: source.engine(engine_config, model_config) for name, source in SOURCES.items() if source.engine}
        settings = {
            name: tuple(Setting(key, value) for key in SOURCES[name].keys_of(role)) for name, value in values.items()
        }
        mode = mode_by_flags(engine_config.use_prefix_grouper, model_config.use_remove_padding)
        return cls(role, mode, get_device_name(), settings, values, model_config.hf_config)

    def value(self, name: str) -> Any:
        """The value in force, None where it is unknown."""
        return self.values.get(name)


def effective_sp_size(config: DictConfig, role: Role) -> int:
    """Ranks that share the rows of a role's micro-batch: Ulysses sequence parallelism."""
    return Facts.from_hydra(config, role).value("sp_size") or 1


def runs_critic(config: DictConfig) -> bool:
    """verl's ``need_critic`` without its warning, which is meant for one call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return need_critic(config)


def read_setting(config: DictConfig, key: str) -> Setting:
    """The entry at a key, with the interpolation that its value was taken from."""
    parent, _, leaf = key.rpartition(".")
    section = OmegaConf.select(config, parent)
    follows = ""
    if isinstance(section, DictConfig) and leaf in section and OmegaConf.is_interpolation(section, leaf):
        follows = str(OmegaConf.to_container(section, resolve=False)[leaf])  # type: ignore[index, call-overload]
    return Setting(key, OmegaConf.select(config, key), follows)
