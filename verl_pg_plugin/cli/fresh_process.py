"""What a process sees that imports verl first, as verl's workers do; writes one JSON line to stdout.

The doctor runs this file's text with ``python -c``: its own process has imported the plugin already.
"""

import json
import sys
from importlib.util import find_spec
from itertools import product


def main() -> None:
    import verl.workers.engine  # noqa: F401  (loads plugins, and registers verl's own engines)
    from verl.plugin.platform import get_platform
    from verl.utils.device import get_vendor

    plugin, plugin_error = sys.modules.get("verl_pg_plugin"), ""
    try:
        if plugin is not None:
            plugin.register()  # raises what the import only logs
    except Exception as raised:  # whatever it is, no training would show it
        plugin_error = f"{type(raised).__name__}: {raised}"
    engines, others = {}, {}
    if plugin is not None and not plugin_error:
        from verl_pg_plugin.config.engine_config import assert_in_force

        asked = [*product(("language_model", "value_model"), ("fsdp", "fsdp2"))]
        asked += [("language_model", "veomni")] if find_spec("veomni") else []
        for model_type, strategy in asked:
            try:
                engines[f"{model_type} {strategy}"] = assert_in_force(strategy, model_type)
            except (RuntimeError, AssertionError, ValueError) as error:
                others[f"{model_type} {strategy}"] = str(error)
    platform = get_platform()
    seen = {
        "engines": engines,
        "others": others,
        "plugin_error": plugin_error,
        "platform": type(platform).__name__,
        "device": platform.device_name,
        "vendor": get_vendor(),
        "available": platform.is_available(),
    }
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
