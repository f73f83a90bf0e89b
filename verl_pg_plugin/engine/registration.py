"""Put our engines in front of verl's FSDP engines; ``config.in_force`` notices when they are not.

verl looks engines up by (device, vendor) before device, so entries for ("cuda", "nvidia") win over the stock ones
without touching them; for "cpu" verl has no entry at all (verl 0.9.1, workers/engine/base.py, EngineRegistry).
"""

from verl.workers.engine.base import BaseEngine, EngineRegistry

from verl_pg_plugin.config.keys import FSDP_STRATEGIES
from verl_pg_plugin.engine.fsdp_engine import PrefixGrouperFSDPEngineWithLMHead, PrefixGrouperFSDPEngineWithValueHead

_ENGINES: dict[str, type[BaseEngine]] = {
    "language_model": PrefixGrouperFSDPEngineWithLMHead,
    "value_model": PrefixGrouperFSDPEngineWithValueHead,
}


def register_engines() -> None:
    """Register our engines for CUDA (vendor nvidia) and CPU; calling it again changes nothing.

    Raises:
        RuntimeError: another plugin holds one of the keys.
    """
    for model_type, engine_cls in _ENGINES.items():
        for strategy in FSDP_STRATEGIES:
            for device, vendor in (("cuda", "nvidia"), ("cpu", None)):
                key = (device, vendor) if vendor else device
                holder = EngineRegistry._engines.get(model_type, {}).get(strategy, {}).get(key)
                if holder is engine_cls:
                    continue
                if holder is not None:
                    raise RuntimeError(
                        f"{holder.__module__}.{holder.__qualname__} is already registered as verl's {model_type} "
                        f"engine for {key}, strategy {strategy}; only one plugin can hold it: uninstall the other, or "
                        "exclude it with VERL_USE_EXTERNAL_PLUGINS=verl_pg_plugin"
                    )
                EngineRegistry.register(model_type, strategy, device=device, vendor=vendor)(engine_cls)
