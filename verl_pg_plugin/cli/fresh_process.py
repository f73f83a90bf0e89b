"""What a process sees that imports verl first, as verl's workers do; writes one JSON line to stdout.

The doctor runs this file's text with ``python -c``: its own process has imported the plugin already.
"""

import json
import sys


def main() -> None:
    import verl.workers.engine  # noqa: F401  (loads plugins, and registers verl's own engines)
    from verl.plugin.platform import get_platform
    from verl.utils.device import get_vendor
    from verl.workers.engine.base import EngineRegistry

    engines = {}
    for model_type in ("language_model", "value_model"):
        for strategy in ("fsdp", "fsdp2"):
            try:
                engine_cls = EngineRegistry.get_engine_cls(model_type, strategy)
                built = f"{engine_cls.__module__}.{engine_cls.__qualname__}"
            except (AssertionError, ValueError) as error:
                built = str(error)
            engines[f"{model_type} {strategy}"] = built
    plugin, plugin_error = sys.modules.get("verl_pg_plugin"), ""
    try:
        if plugin is not None:
            plugin.register()  # raises what the import only logs
    except Exception as raised:  # whatever it is, no training would show it
        plugin_error = f"{type(raised).__name__}: {raised}"
    platform = get_platform()
    seen = {
        "engines": engines,
        "loaded": plugin is not None,
        "plugin_error": plugin_error,
        "platform": type(platform).__name__,
        "device": platform.device_name,
        "vendor": get_vendor(),
        "available": platform.is_available(),
    }
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
