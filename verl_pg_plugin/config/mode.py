"""The four modes, selected by flags that verl already has, and the settings of one engine."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.keys import (
    ACTOR,
    CRITIC,
    CRITIC_MODEL,
    MODEL,
    OPTIONS,
    REF,
    USE_PREFIX_GROUPER,
    USE_REMOVE_PADDING,
    VEOMNI,
)

SP_SIZE = "ulysses_sequence_parallel_size"


class Mode(Enum):
    """Format of the model's input. The values are the names in logs."""

    PADDED = "padded"
    RMPAD = "rmpad"
    PADDED_GROUPS = "prefix_grouper"
    PACKED = "packed"

    @property
    def shares_prefixes(self) -> bool:
        """True for the modes of this plugin's engines, False for stock verl."""
        return self in (Mode.PADDED_GROUPS, Mode.PACKED)


def mode_of(config: DictConfig) -> Mode:
    """Return the mode that ``actor.use_prefix_grouper`` and ``model.use_remove_padding`` of a trainer config select."""
    return mode_by_flags(OmegaConf.select(config, USE_PREFIX_GROUPER), OmegaConf.select(config, USE_REMOVE_PADDING))


def mode_by_flags(use_prefix_grouper: Any, use_remove_padding: Any) -> Mode:
    """Return the mode of one engine, whose model may have its own padding flag. Strings are true, as in verl."""
    if use_prefix_grouper:
        return Mode.PACKED if use_remove_padding else Mode.PADDED_GROUPS
    return Mode.RMPAD if use_remove_padding else Mode.PADDED


@dataclass(frozen=True)
class Engine:
    """One engine of a run and its configs: verl's dataclasses in a worker, config sections before Ray starts."""

    role: str  # ``ACTOR``, ``REF`` or ``CRITIC``
    config: Any  # engine config
    model: Any  # model config
    device: str  # device type, as verl names it
    hf_config: Any = None  # checkpoint config with overrides; None if it cannot be read here
    sp_key: str = ""  # key that sets the Ulysses size

    @classmethod
    def of(cls, engine_config: Any, model_config: Any) -> "Engine":
        """Return the engine that a worker builds from our engine config and verl's ``HFModelConfig``."""
        from verl.utils.device import get_device_name

        role = REF if engine_config.forward_only else ACTOR
        if model_config.model_type == "value_model":
            role = CRITIC
        engine = cls(role, engine_config, model_config, get_device_name(), model_config.hf_config)
        return replace(engine, sp_key=f"{engine.section}.{engine.sp_name}")

    @property
    def mode(self) -> Mode:
        return mode_by_flags(self.get("use_prefix_grouper"), self.of_model("use_remove_padding"))

    @property
    def on_veomni(self) -> bool:
        """True for verl's VeOmni engine, False for its FSDP engine."""
        return bool(self.get("strategy") == VEOMNI)

    @property
    def section(self) -> str:
        """Key of the engine config in the trainer config."""
        fsdp = "fsdp" if self.role == CRITIC else "fsdp_config"
        return f"{self.role}.{VEOMNI if self.on_veomni else fsdp}"

    @property
    def sp_name(self) -> str:
        """Name of the Ulysses size in the engine config."""
        return "ulysses_parallel_size" if self.on_veomni else SP_SIZE

    @property
    def model_section(self) -> str:
        return CRITIC_MODEL if self.role == CRITIC else MODEL

    @property
    def sp_size(self) -> int:
        """Ranks that share the tokens of a micro-batch; 1 unless the config has a positive integer."""
        size = self.get(self.sp_name)
        return size if isinstance(size, int) and size > 0 else 1

    def get(self, path: str) -> Any:
        return _read(self.config, path)

    def of_model(self, path: str) -> Any:
        return _read(self.model, path)

    def model_setting(self, path: str) -> str:
        """Return a setting of the model config as on the command line."""
        return f"{self.model_section}.{path}={self.of_model(path)}"

    def option(self, name: str) -> Any:
        return _read(self.config, f"{OPTIONS}.{name}")


def _read(section: Any, path: str) -> Any:
    """Return the value at a dotted path of a mapping or dataclass, or None."""
    for name in path.split("."):
        section = section.get(name) if hasattr(section, "get") else getattr(section, name, None)
    return section
