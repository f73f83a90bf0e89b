"""What a process sees that imports verl first, as verl's workers do; writes one JSON line to stdout.

The doctor runs this file's text with ``python -c``: its own process has imported the plugin already. What a plugin
raises verl logs at DEBUG, and ours logs it as a warning.
"""

import json
import os
import sys
from importlib.metadata import EntryPoint, entry_points


def plugin(entry_point: EntryPoint) -> dict[str, object]:
    """Whether verl may load it, and the error if it does not load."""
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    allowed = policy == "auto" or entry_point.name in [name.strip() for name in policy.split(",")]
    error = ""
    if allowed:
        try:
            module = entry_point.load()
            if entry_point.name == "verl_pg_plugin":
                module.register()  # raises what the import only logs
        except Exception as raised:  # whatever it is, no training would show it
            error = f"{type(raised).__name__}: {raised}"
    return {"name": entry_point.name, "value": entry_point.value, "allowed": allowed, "error": error}


def main() -> None:
    import verl.workers.engine  # noqa: F401  (registers verl's own)
    from verl.plugin.platform import get_platform
    from verl.utils.device import get_vendor
    from verl.workers.engine.base import EngineRegistry

    engines = []
    for model_type in ("language_model", "value_model"):
        for strategy in ("fsdp", "fsdp2"):
            found = {"model_type": model_type, "strategy": strategy, "built": "", "error": ""}
            try:
                engine_cls = EngineRegistry.get_engine_cls(model_type, strategy)
                found["built"] = f"{engine_cls.__module__}.{engine_cls.__qualname__}"
            except (AssertionError, ValueError) as error:
                found["error"] = str(error)
            engines.append(found)
    platform = get_platform()
    seen = {
        "engines": engines,  # before anything is loaded a second time
        "plugins": [plugin(entry_point) for entry_point in entry_points(group="verl.plugins")],
        "platform": type(platform).__name__,
        "device": platform.device_name,
        "vendor": get_vendor(),
        "available": platform.is_available(),
    }
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
