"""Would verl build this plugin's engine on this machine?"""

from __future__ import annotations

from verl.workers.engine.base import EngineRegistry

__all__ = ["assert_in_force"]


def assert_in_force(strategy: str, model_type: str = "language_model") -> None:
    """Check that verl would build our engine on this machine, or one derived from it.

    Args:
        strategy: verl's name of the back end, such as "fsdp2".
        model_type: "language_model" or "value_model".

    Raises:
        RuntimeError: verl would build another engine, so asking for prefix sharing would do nothing.
    """
    engine_cls = EngineRegistry.get_engine_cls(model_type, strategy)
    if not any(base.__module__.startswith("verl_pg_plugin.") for base in engine_cls.__mro__):
        raise RuntimeError(
            f"actor.use_prefix_grouper=True, but verl would build {engine_cls.__module__}.{engine_cls.__qualname__} "
            f"for strategy {strategy} and silently share nothing; unset VERL_ENGINE_DEVICE and VERL_ENGINE_VENDOR, "
            "and check that VERL_USE_EXTERNAL_PLUGINS does not exclude verl_pg_plugin"
        )
