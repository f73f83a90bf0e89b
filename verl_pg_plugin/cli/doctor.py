"""``doctor``: report what verl would run on this machine, what a set of overrides selects, and what fails."""

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
    "from verl_pg_plugin.cli.doctor import report_process; report_process(is_loaded)"
)
"""Runs in a process that imports verl first, as verl's workers do."""
TIMEOUT_S = 300
PACKAGES = (
    *("verl-pg-plugin", "verl", "torch", "triton", "transformers", "prefix_grouper", "flash-attn", "flash-attn-3"),
    *("flash-attn-4", "liger-kernel", "ray", "TransferQueue", "tensordict", "hydra-core"),
)
NO_GPU_FIX = "export VERL_PLATFORM=cpu to run without a GPU, or repair the driver (nvidia-smi lists no GPU)"
REGISTER_FIX = f"correct the error; {sys.executable} -c 'import {NAME}; {NAME}.register()' shows its traceback"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, and a set of overrides, without starting anything",
        description="Exit code 0: no check fails. 1: a check fails (see its fix). 2: Hydra refuses the overrides.",
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help="overrides of a run to check; they imply --full")
    add("--full", action="store_true", help="import verl as a worker does, and check engines and signatures (30 s)")
    add("--config-path", "-cp", default="", help="config folder of another entry point")
    add("--config-name", "-cn", default="", help="name of a config in that folder")
    add("--json", action="store_true", help="write the checks and the verdict as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report and return the exit code: 1 if a check fails, else 0."""
    if bool(args.config_path) != bool(args.config_name):
        raise CommandError("--config-path and --config-name go together")
    if args.full or args.overrides or args.config_name:
        return show(_full(args.overrides, args.config_path, args.config_name), as_json=args.json)
    sections = ("Versions", version_lines()), ("verl", installed_lines()), ("Attention kernels", kernel_lines())
    return show(sections, as_json=args.json)


def show(sections: Iterable[Section], as_json: bool = False) -> int:
    """Print each section, each check with its fix below it, and the verdict; or all as one JSON object."""
    results = []
    for title, checks in sections:
        results += [{"section": title, **asdict(check)} for check in checks]
        if as_json or not checks:
            continue
        sys.stdout.write(f"{title}\n")
        lines = in_columns([(check.status.ljust(4), check.what, check.text) for check in checks])
        for check, line in zip(checks, lines, strict=True):
            sys.stdout.write(f"  {line}\n" + (f"        fix: {check.fix}\n" if check.fix else ""))
    problems = sum(check["status"] == FAIL for check in results)
    verdict = next((f"off; {x['fix']} switches it on" for x in results if x["what"] == MODE and x["fix"]), "ready")
    verdict = f"not ready ({problems} problem{'s' if problems > 1 else ''})" if problems else verdict
    report = {"ready": verdict == "ready", "problems": problems, "checks": results}
    sys.stdout.write(f"{json.dumps(report, indent=2)}\n" if as_json else f"prefix sharing: {verdict}\n")
    return int(problems > 0)


def _full(arguments: list[str], folder: str, name: str) -> Iterator[Section]:
    """Yield all sections; if verl or this package does not load, without those that need their modules."""
    process = fresh_process()
    selected, config = [], None
    if "error" not in process and not process["plugin_error"]:
        try:
            register()  # this process imported the package before verl
        except Exception as error:  # an import may raise anything
            process["plugin_error"] = f"{type(error).__name__}: {error}"
        from verl_pg_plugin.cli import overrides
        from verl_pg_plugin.config.preflight import joins_cluster

        selected = overrides.selected_kernel(process["device"])
        if arguments or name:
            config = overrides.compose_config(arguments, folder, name)  # before any output: it may raise
            if process["platform"]["status"] == FAIL and joins_cluster(config):
                process["platform"] |= {"status": WARN, "fix": "run the doctor on a machine of the cluster with GPUs"}
    yield "Versions", version_lines()
    yield "verl", process_lines(process)
    if "error" not in process:
        yield "Engines", [Check(**engine) for engine in process["engines"]]
        yield "Names of verl, transformers and torch that the plugin uses", name_lines()
    yield "Attention kernels", [*kernel_lines(), *selected]
    if config is not None:
        yield "With these overrides", overrides.run_lines(config, asks_verl=not name)  # verl's trainer only


def version_lines() -> list[Check]:
    """Return the installed versions, and the packages that are missing or outside the declared range."""
    required, tested = compat.requirements("trainer"), compat.requirements("tested")
    lines = [Check(OK, "python", platform.python_version())]
    for name in dict.fromkeys([*PACKAGES, *required]):
        installed, requirement = compat.installed(name), required.get(name)
        if requirement is None:
            lines.append(Check(OK, name, installed or "not installed (optional)"))
            continue
        fix, supported = f"pip install '{name}{requirement.specifier}'", tested.get(name, requirement)
        if installed is None:
            lines.append(Check(FAIL, name, "not installed", fix))
        elif not requirement.specifier.contains(installed, prereleases=True):
            lines.append(Check(FAIL, name, f"{installed} is outside the supported range {requirement.specifier}", fix))
        elif not supported.specifier.contains(installed, prereleases=True):
            text = f"{installed} is outside the tested range {supported.specifier}; runs start with a warning"
            lines.append(Check(WARN, name, text, f"pip install '{supported}'"))
        elif name in PACKAGES:
            lines.append(Check(OK, name, f"{installed} (supported: {supported.specifier or 'any'})"))
    return lines


def installed_lines() -> list[Check]:
    """Check the plugin and the GPUs by metadata and nvidia-smi, without an import of verl or torch."""
    no_gpu = Check(FAIL, "GPU", "no GPU", NO_GPU_FIX)
    if os.environ.get("VERL_PLATFORM") == "cpu":
        no_gpu = Check(OK, "GPU", "no GPU, and VERL_PLATFORM=cpu")
    checks = [Check(OK, "GPU", gpu) for gpu in gpus()]
    return [_plugin_line("installed; doctor --full loads it as a worker of verl does"), *(checks or [no_gpu])]


def _plugin_line(text: str, error: str = "") -> Check:
    """Check that verl finds and loads the plugin: ``text`` if it does, ``error`` if the load fails."""
    what, policy = f"plugin {NAME}", os.environ.get(POLICY, "auto").strip().lower()
    is_named = NAME in os.environ.get(MODULES, "").split(",")
    if not (is_named or entry_points(group="verl.plugins", name=NAME)):
        fix = f"{sys.executable} -m pip install <folder of this repository>"
        return Check(FAIL, what, "not installed: it has no entry point in the group verl.plugins", fix)
    if not is_named and policy != "auto" and NAME not in [name.strip() for name in policy.split(",")]:
        why, fix = f"{POLICY}={policy} keeps verl from loading it", f"unset {POLICY}, or add {NAME} to it"
        return Check(FAIL, what, why, fix)
    if error:
        return Check(FAIL, what, f"verl runs without it: {error}", REGISTER_FIX)
    return Check(OK, what, text)


def kernel_lines() -> list[Check]:
    """Report by metadata which attention kernels of packed mode are installed."""
    return [
        Check(OK, name, "installed" if spec.installed else f"not installed (optional): {spec.install}")
        for name, spec in KERNELS.items()
    ]


def fresh_process() -> dict[str, Any]:
    """Return the output of ``report_process`` in a new process, or only ``error`` if verl does not load."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"it takes more than {TIMEOUT_S} s"}
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the process ended with {result.returncode}"}  # a signal
    return dict(json.loads(result.stdout.strip().splitlines()[-1]))


def report_process(is_loaded: bool) -> None:
    """Print the platform, engines and errors of this process as JSON; ``is_loaded``: verl has loaded the plugin."""
    from verl.plugin.platform import get_platform
    from verl.utils.device import get_vendor

    platform, plugin_error, engines = get_platform(), "", []
    text = f"{type(platform).__name__}, device {platform.device_name}, vendor {get_vendor()}"
    missing = Check(FAIL, "GPU", f"{text}: no such device", NO_GPU_FIX)
    try:
        if is_loaded:
            register()  # raises the errors that the import only logs
    except Exception as raised:
        plugin_error = f"{type(raised).__name__}: {raised}"
    if is_loaded and not plugin_error:
        from verl_pg_plugin.config.engine_config import assert_in_force

        kinds = [*product(("language_model", "value_model"), ("fsdp", "fsdp2"))]
        kinds += [("language_model", "veomni")] if find_spec("veomni") else []
        for model_type, strategy in kinds:
            what = f"{model_type} {strategy}"
            try:
                engines.append(Check(OK, what, assert_in_force(strategy, model_type)))
            except (RuntimeError, AssertionError, ValueError) as error:
                fix = "correct it, on an NVIDIA GPU or with VERL_PLATFORM=cpu"
                engines.append(Check(FAIL, what, str(error), fix))
    report = {
        "device": platform.device_name,
        "platform": asdict(Check(OK, "platform", text) if platform.is_available() else missing),
        "plugin_error": plugin_error,
        "engines": [asdict(engine) for engine in engines],
    }
    sys.stdout.write("\n" + json.dumps(report) + "\n")


def process_lines(process: dict[str, Any]) -> list[Check]:
    """Report the platform that verl selects, and whether verl loads the plugin."""
    if error := process.get("error"):
        fix = f"correct the error; {sys.executable} -c 'import verl.workers.engine' shows its traceback"
        return [Check(FAIL, "import verl", f"fails: {error}", fix), _plugin_line("not loaded, because verl is not")]
    return [Check(**process["platform"]), _plugin_line("loads", process["plugin_error"])]


def name_lines() -> list[Check]:
    """Report names of other packages that differ from the tested versions."""
    problems = (problem.partition("; pip install ") for problem in compat.problems())
    checks = [Check(FAIL, "names", why, f"pip install {fix}") for why, _, fix in problems]
    return checks or [Check(OK, "names", f"all {len(compat.NAMES)} names match the tested versions")]
