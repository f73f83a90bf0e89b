"""Register our FSDP and VeOmni engines with verl; ``config.engine_config`` checks that verl would build them.

verl looks engines up by (device, vendor) before device, so entries for ("cuda", "nvidia") precede the stock ones. verl
0.9.1 has no entry for "cpu" (workers/engine/base.py, EngineRegistry). Our entries build our engine or verl's, depending
on the engine config, and import ours only then.
"""

from pkgutil import resolve_name
from typing import Any

from torch import nn
from verl.utils.device import get_device_name
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_pg_plugin import upstream
from verl_pg_plugin.config.keys import FSDP_STRATEGIES, VEOMNI


class StockValueModelOnCPU(FSDPEngineWithValueHead):
    """verl's value model, loaded without flash-attn."""

    def _build_module(self) -> nn.Module:
        from verl_pg_plugin.engine.prepare import load_value_model

        with upstream.value_models_loaded_by(load_value_model):
            return super()._build_module()


class _Entry(BaseEngine):
    """Builds ``ours`` if the engine config has ``use_prefix_grouper=True``, else ``stock``."""

    ours: str  # module in this package, and class
    stock: type[BaseEngine]

    def __new__(cls, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(engine_config, "use_prefix_grouper", False):
            return resolve_name(f"{__package__}.{cls.ours}")(model_config, engine_config, *args, **kwargs)
        return cls.stock(model_config, engine_config, *args, **kwargs)


class PrefixGrouperFSDPEngineWithLMHead(_Entry):
    ours, stock = "engine:SharedPrefixLanguageModel", FSDPEngineWithLMHead


class PrefixGrouperFSDPEngineWithValueHead(_Entry):
    ours = "engine:SharedPrefixValueModel"
    stock = StockValueModelOnCPU if get_device_name() == "cpu" else FSDPEngineWithValueHead


_ENTRIES: dict[tuple[str, str], type[BaseEngine]] = {
    **{("language_model", strategy): PrefixGrouperFSDPEngineWithLMHead for strategy in FSDP_STRATEGIES},
    **{("value_model", strategy): PrefixGrouperFSDPEngineWithValueHead for strategy in FSDP_STRATEGIES},
}
"""Our entries by model type and strategy."""

if VEOMNI in EngineRegistry._engines["language_model"]:  # verl registers it if the package veomni is installed
    from verl.workers.engine.veomni import VeOmniEngineWithLMHead

    class PrefixGrouperVeOmniEngineWithLMHead(_Entry):
        ours, stock = "veomni:SharedPrefixVeOmniLanguageModel", VeOmniEngineWithLMHead

    _ENTRIES["language_model", VEOMNI] = PrefixGrouperVeOmniEngineWithLMHead


def register_engines() -> list[str]:
    """Register our engines for CUDA (vendor nvidia) and CPU, and return the strategies; idempotent.

    Raises RuntimeError if another plugin has registered one of the keys.
    """
    for (model_type, strategy), entry in _ENTRIES.items():
        for device, vendor in (("cuda", "nvidia"), ("cpu", None)):
            key = (device, vendor) if vendor else device
            holder = EngineRegistry._engines.get(model_type, {}).get(strategy, {}).get(key)
            if holder is entry:
                continue
            if holder is not None:
                raise RuntimeError(
                    f"{holder.__module__}.{holder.__qualname__} is already registered as verl's {model_type} engine "
                    f"for {key}, strategy {strategy}. Fix: uninstall that plugin, or set "
                    "VERL_USE_EXTERNAL_PLUGINS=verl_pg_plugin"
                )
            EngineRegistry.register(model_type, strategy, device=device, vendor=vendor)(entry)
    return [strategy for model_type, strategy in _ENTRIES if model_type == "language_model"]
