"""``doctor``: what verl would run on this machine, what a set of overrides would select, and what is in the way."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import product
from typing import Any

from verl_pg_plugin import compat, register
from verl_pg_plugin.attention.kernels import KERNELS, gpus
from verl_pg_plugin.cli import FAIL, MODE, OK, WARN, Check, CommandError, Section, in_columns

NAME = "verl_pg_plugin"
POLICY, MODULES = "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES"
SCRIPT = (
    "import sys, verl.workers.engine; is_loaded = 'verl_pg_plugin' in sys.modules; "
    "from verl_pg_plugin.cli.doctor import tell; tell(is_loaded)"
)
"""Of a process that imports verl first, as verl's workers do; the doctor's own has imported the plugin already."""
TIMEOUT_S = 300
PACKAGES = (
    *("verl-pg-plugin", "verl", "torch", "triton", "transformers", "prefix_grouper", "flash-attn", "flash-attn-3"),
    *("flash-attn-4", "liger-kernel", "ray", "TransferQueue", "tensordict", "hydra-core"),
)
NO_GPU_FIX = "export VERL_PLATFORM=cpu to run without a GPU, or repair the driver until nvidia-smi lists one"
REGISTER_FIX = f"correct what it names; {sys.executable} -c 'import {NAME}; {NAME}.register()' shows where"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, and a set of overrides, without starting anything",
        description="Exit code 0: nothing fails. 1: something does, its fix below it. 2: Hydra refuses the overrides.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="of python -m verl_pg_plugin.main_ppo or verl.trainer.main_ppo: also what a run with them would say",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="import verl as a worker does, and look at engines and signatures; overrides imply it (half a minute)",
    )
    parser.add_argument("--config-path", "-cp", default="", help="folder of another entry point's configs")
    parser.add_argument("--config-name", "-cn", default="", help="the config there")
    parser.add_argument("--json", action="store_true", help="write the same checks and the verdict as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the report; 1 if something fails, else 0."""
    if bool(args.config_path) != bool(args.config_name):
        raise CommandError("--config-path and --config-name go together")
    if args.full or args.overrides or args.config_name:
        return show(_full(args.overrides, args.config_path, args.config_name), as_json=args.json)
    sections = ("Versions", version_lines()), ("verl", installed_lines()), ("Attention kernels", kernel_lines())
    return show(sections, as_json=args.json)


def show(sections: Iterable[Section], as_json: bool = False) -> int:
    """Write sections as they come, each check with its fix below it, then the verdict; or all of it as one object."""
    found = []
    for title, checks in sections:
        found += [{"section": title, **asdict(check)} for check in checks]
        if as_json or not checks:
            continue
        sys.stdout.write(f"{title}\n")
        lines = in_columns([(check.status.ljust(4), check.what, check.text) for check in checks])
        for check, line in zip(checks, lines, strict=True):
            sys.stdout.write(f"  {line}\n" + (f"        fix: {check.fix}\n" if check.fix else ""))
    problems = sum(check["status"] == FAIL for check in found)
    ready = next((f"off; {x['fix']} switches it on" for x in found if x["what"] == MODE and x["fix"]), "ready")
    ready = f"not ready ({problems} problem{'s' if problems > 1 else ''})" if problems else ready
    told = {"ready": ready == "ready", "problems": problems, "checks": found}
    sys.stdout.write(f"{json.dumps(told, indent=2)}\n" if as_json else f"prefix sharing: {ready}\n")
    return int(problems > 0)


def _full(asked: list[str], folder: str, name: str) -> Iterator[Section]:
    """Everything that can be said; where verl or this package does not load, what needs their modules is left out."""
    process = fresh_process()
    taken, config = [], None
    if "error" not in process and not process["plugin_error"]:
        try:
            register()  # as there; this process has imported the package before verl
        except Exception as error:  # whatever an import raises
            process["plugin_error"] = f"{type(error).__name__}: {error}"
        from verl_pg_plugin.cli import overrides
        from verl_pg_plugin.config.preflight import joins_cluster

        taken = overrides.taken_kernel(process["device"])
        if asked or name:
            config = overrides.compose_config(asked, folder, name)  # first: one line where it is wrong
            if process["platform"]["status"] == FAIL and joins_cluster(config):
                process["platform"] |= {"status": WARN, "fix": "run the doctor on a machine of the cluster with GPUs"}
    yield "Versions", version_lines()
    yield "verl", process_lines(process)
    if "error" not in process:
        yield "Engines", [Check(**engine) for engine in process["engines"]]
        yield "Names of verl, transformers and torch that are built on", name_lines()
    yield "Attention kernels", [*kernel_lines(), *taken]
    if config is not None:
        yield "With these overrides", overrides.run_lines(config, asks_verl=not name)  # another trainer may not


# This machine


def version_lines() -> list[Check]:
    """Installed versions, and what is missing or outside the range that this package declares."""
    wanted, tested = compat.requirements("trainer"), compat.requirements("tested")
    lines = [Check(OK, "python", platform.python_version())]
    for name in dict.fromkeys([*PACKAGES, *wanted]):
        installed, requirement = compat.installed(name), wanted.get(name)
        if requirement is None:
            lines.append(Check(OK, name, installed or "not installed (optional)"))
            continue
        fix, supported = f"pip install '{name}{requirement.specifier}'", tested.get(name, requirement)
        if installed is None:
            lines.append(Check(FAIL, name, "not installed", fix))
        elif not requirement.specifier.contains(installed, prereleases=True):
            lines.append(Check(FAIL, name, f"{installed} is outside the supported range {requirement.specifier}", fix))
        elif not supported.specifier.contains(installed, prereleases=True):
            text = f"{installed} is outside of what was tested, {supported.specifier}; runs say so and go on"
            lines.append(Check(WARN, name, text, f"pip install '{supported}'"))
        elif name in PACKAGES:
            lines.append(Check(OK, name, f"{installed} (supported: {supported.specifier or 'any'})"))
    return lines


def installed_lines() -> list[Check]:
    """What metadata and nvidia-smi tell of the plugin and of GPUs, without an import of verl or torch."""
    none = Check(FAIL, "GPU", "none found", NO_GPU_FIX)
    if os.environ.get("VERL_PLATFORM") == "cpu":
        none = Check(OK, "GPU", "none, and VERL_PLATFORM=cpu")
    found = [Check(OK, "GPU", gpu) for gpu in gpus()]
    return [_plugin_line("installed; doctor --full loads it as a worker of verl does"), *(found or [none])]


def _plugin_line(text: str, error: str = "") -> Check:
    """Whether verl finds the plugin and may load it; ``text`` where it does, ``error`` where it then fails."""
    what, policy = f"plugin {NAME}", os.environ.get(POLICY, "auto").strip().lower()
    is_named = NAME in os.environ.get(MODULES, "").split(",")
    if not (is_named or entry_points(group="verl.plugins", name=NAME)):
        fix = f"{sys.executable} -m pip install <folder of this repository>"
        return Check(FAIL, what, "not installed: verl finds no entry point", fix)
    if not is_named and policy != "auto" and NAME not in [name.strip() for name in policy.split(",")]:
        why, fix = f"{POLICY}={policy} keeps verl from loading it", f"unset {POLICY}, or name {NAME} in it"
        return Check(FAIL, what, why, fix)
    if error:
        return Check(FAIL, what, f"verl goes on without it: {error}", REGISTER_FIX)
    return Check(OK, what, text)


def kernel_lines() -> list[Check]:
    """Which attention kernels of packed mode are installed, by metadata."""
    return [
        Check(OK, name, "installed" if spec.installed else f"not installed (optional): {spec.install}")
        for name, spec in KERNELS.items()
    ]


def fresh_process() -> dict[str, Any]:
    """What a worker of verl's would see, see ``tell``; ``error`` alone where verl does not load."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"it takes more than {TIMEOUT_S} s"}
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the process ended with {result.returncode}"}  # a signal
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def tell(is_loaded: bool) -> None:
    """Write what there is in this process, whose import of verl has loaded the plugin or not, as a line of JSON."""
    from verl.plugin.platform import get_platform
    from verl.utils.device import get_vendor

    platform, plugin_error, engines = get_platform(), "", []
    text = f"{type(platform).__name__}, device {platform.device_name}, vendor {get_vendor()}"
    missing = Check(FAIL, "GPU", f"{text}: no such device found", NO_GPU_FIX)
    try:
        if is_loaded:
            register()  # raises what the import only logs
    except Exception as raised:  # whatever it is, no training would show it
        plugin_error = f"{type(raised).__name__}: {raised}"
    if is_loaded and not plugin_error:
        from verl_pg_plugin.config.engine_config import assert_in_force

        asked = [*product(("language_model", "value_model"), ("fsdp", "fsdp2"))]
        asked += [("language_model", "veomni")] if find_spec("veomni") else []
        for model_type, strategy in asked:
            what = f"{model_type} {strategy}"
            try:
                engines.append(Check(OK, what, assert_in_force(strategy, model_type)))
            except (RuntimeError, AssertionError, ValueError) as error:
                fix = "do what it says, on an NVIDIA GPU or with VERL_PLATFORM=cpu"
                engines.append(Check(FAIL, what, str(error), fix))
    seen = {
        "device": platform.device_name,
        "platform": asdict(Check(OK, "platform", text) if platform.is_available() else missing),
        "plugin_error": plugin_error,
        "engines": [asdict(engine) for engine in engines],
    }
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


def process_lines(process: dict[str, Any]) -> list[Check]:
    """The platform that verl takes and whether it loads ours."""
    if error := process.get("error"):
        fix = f"correct what it names; {sys.executable} -c 'import verl.workers.engine' shows where it happens"
        return [Check(FAIL, "import verl", f"fails: {error}", fix), _plugin_line("not loaded, since verl is not")]
    return [Check(**process["platform"]), _plugin_line("loads", process["plugin_error"])]


def name_lines() -> list[Check]:
    """Names of other packages that look otherwise than where this package was tested."""
    found = [
        Check(FAIL, "names", why, f"pip install {fix}")
        for why, _, fix in (p.partition("; pip install ") for p in compat.problems())
    ]
    return found or [Check(OK, "names", f"all {len(compat.NAMES)} are as they were")]
