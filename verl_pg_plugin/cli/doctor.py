"""``doctor``: what verl would run on this machine, what a set of overrides would select, and what is in the way."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from verl_pg_plugin import register
from verl_pg_plugin.cli import CommandError, in_columns

if TYPE_CHECKING:
    from omegaconf import DictConfig

NAME = "verl_pg_plugin"
PROJECT = "verl-pg-plugin"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
SCRIPT = Path(__file__).with_name("fresh_process.py")
TIMEOUT_S = 300
OK, WARN, FAIL, FACT = "OK", "WARN", "FAIL", ""
PACKAGES = (
    *(PROJECT, "verl", "torch", "triton", "transformers", "prefix_grouper", "flash-attn", "flash-attn-3"),
    *("flash-attn-4", "liger-kernel", "ray", "TransferQueue", "tensordict", "hydra-core"),
)
NO_PLUGIN_FIX = f"{sys.executable} -m pip install <folder of this repository>"
NO_GPU_FIX = "export VERL_PLATFORM=cpu to run without a GPU, or repair the driver until nvidia-smi lists one"


@dataclass(frozen=True)
class Line:
    """One line of the report.

    Attributes:
        state: OK, WARN (a run starts all the same), FAIL, or empty for what is neither good nor bad.
        what: it is about.
        text: what was found.
        fix: of a warning or failure, the override or command that removes it.
    """

    state: str
    what: str
    text: str
    fix: str = ""


Section = tuple[str, list[Line]]


def add_parser(subparsers: Any) -> None:
    """Add ``doctor`` to the command line."""
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the report.

    Returns:
        0, or 1 if something fails.

    Raises:
        CommandError: Hydra cannot compose the overrides.
    """
    if not (args.full or args.overrides):
        return show([("Versions", version_lines()), ("verl", installed_lines())])
    # What verl and its imports have to say about this machine is in the report.
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    return show(_full(args.overrides))


def _full(overrides: list[str]) -> Iterator[Section]:
    """Everything that can be said; where verl or this package does not load, what needs their modules is left out."""
    process = fresh_process()
    error = "" if process.get("error") else registration_error()
    loads = not (process.get("error") or error or any(p["error"] for p in process["plugins"] if p["name"] == NAME))
    config = compose_config(overrides) if overrides and loads else None  # first: a wrong one ends in a single line
    yield "Versions", version_lines()
    yield "verl", plugin_lines(process, error)
    if not process.get("error"):
        yield "Engines", engine_lines(process)
        yield "Names of verl, transformers and torch that are built on", name_lines()
    if loads:
        yield "Attention kernels", kernel_lines(process["device"], process["available"])
    if config is not None:
        yield "With these overrides", run_lines(config)
        yield "Sharing", sharing_lines(config)


def show(sections: Iterable[Section]) -> int:
    """Write the sections as they come, each line with its state and, below it, its fix; then the verdict.

    Returns:
        Exit code: 1 if a line is FAIL, else 0.
    """
    states: list[str] = []
    for title, lines in sections:
        sys.stdout.write(f"{title}\n")
        texts = in_columns([(line.state.ljust(4), line.what, line.text) for line in lines])
        for line, text in zip(lines, texts, strict=True):
            sys.stdout.write(f"  {text}\n" + (f"        fix: {line.fix}\n" if line.fix else ""))
            states.append(line.state)
    failures, doubts = states.count(FAIL), states.count(WARN)
    verdict = FAIL if failures else WARN if doubts else OK
    sys.stdout.write(f"{verdict}: {failures} failing, {doubts} to look at\n")
    return int(failures > 0)


# This machine


def version_lines() -> list[Line]:
    """Installed versions, and what is missing or outside the range that this package declares."""
    wanted = {requirement.name: requirement for requirement in _requirements()}
    lines = [Line(FACT, "python", platform.python_version())]
    for name in dict.fromkeys([*PACKAGES, *wanted]):
        installed, requirement = _version(name), wanted.get(name)
        fix = f"pip install '{name}{requirement.specifier}'" if requirement else ""
        if requirement is None:
            lines.append(Line(FACT, name, installed or "not installed"))
        elif installed is None:
            lines.append(Line(FAIL, name, "not installed", fix))
        elif not requirement.specifier.contains(installed, prereleases=True):
            lines.append(Line(FAIL, name, f"{installed} is outside the supported range {requirement.specifier}", fix))
        elif name in PACKAGES:
            lines.append(Line(OK, name, f"{installed} (supported: {requirement.specifier or 'any'})"))
    return lines


def installed_lines() -> list[Line]:
    """What metadata and nvidia-smi tell of the plugin, GPUs and kernels, without an import of verl or torch."""
    from verl_pg_plugin.attention.kernels import KERNELS

    lines = []
    if not entry_points(group="verl.plugins", name=NAME):
        lines.append(Line(FAIL, f"plugin {NAME}", "not installed: verl finds no entry point", NO_PLUGIN_FIX))
    elif not _is_allowed():
        lines.append(_excluded())
    else:
        lines.append(Line(OK, f"plugin {NAME}", "installed; doctor --full loads it as a worker of verl does"))
    found = gpus()
    lines += [Line(OK, "GPU", gpu) for gpu in found]
    on_cpu = os.environ.get("VERL_PLATFORM") == "cpu"
    if not found:
        lines.append(
            Line(OK, "GPU", "none, and VERL_PLATFORM=cpu") if on_cpu else Line(FAIL, "GPU", "none found", NO_GPU_FIX)
        )
    lines += [
        Line(OK if spec.installed else FACT, name, "installed" if spec.installed else f"not installed: {spec.install}")
        for name, spec in KERNELS.items()
        if spec.package
    ]
    if found and not on_cpu and not any(spec.package and spec.installed for spec in KERNELS.values()):
        lines.append(Line(FAIL, "attention kernel", "none is installed", KERNELS["flash_attn_2"].install))
    return lines


def gpus() -> list[str]:
    """Name, driver, compute capability and memory of each GPU; empty where nvidia-smi finds none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip().splitlines() if result.returncode == 0 else []


def fresh_process() -> dict[str, Any]:
    """What ``fresh_process.py`` finds in a new process; ``error`` alone where verl does not load."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.read_text()]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"it takes more than {TIMEOUT_S} s"}
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the process ended with {result.returncode}"}  # a signal
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def registration_error() -> str:
    """Why this process could not register our engines, empty if it could.

    It imported this package before verl, as ``main_ppo`` does; another plugin is then earlier than in a fresh process.
    """
    try:
        register()
    except Exception as error:  # whatever it is, the import of this package has only logged it
        return f"{type(error).__name__}: {error}"
    return ""


def plugin_lines(process: dict[str, Any], here: str = "") -> list[Line]:
    """The platform that verl takes and the plugins that it loads; ``here`` is this process' registration error."""
    if error := process.get("error"):
        shows = f"correct what it names; {sys.executable} -c 'import verl.workers.engine' shows where it happens"
        platform_fix = "unset VERL_PLATFORM, or export VERL_PLATFORM=cpu with this plugin installed"
        fix = platform_fix if "Unknown platform" in error and os.environ.get("VERL_PLATFORM") else shows
        return [Line(FAIL, "import verl", f"fails: {error}", fix)]
    text = f"{process['platform']}, device {process['device']}, vendor {process['vendor']}"
    if process["available"]:
        lines = [Line(OK, "platform", text)]
    else:
        lines = [Line(FAIL, "platform", f"{text}: no {process['device']} device found", NO_GPU_FIX)]
    if not any(plugin["name"] == NAME for plugin in process["plugins"]):
        lines.append(Line(FAIL, f"plugin {NAME}", "not installed: verl finds no entry point", NO_PLUGIN_FIX))
    register_fix = f"correct what it names; {sys.executable} -c 'import {NAME}; {NAME}.register()' shows where"
    for plugin in process["plugins"]:
        what, ours, error = f"plugin {plugin['name']}", plugin["name"] == NAME, plugin["error"]
        if error:
            fix = (
                register_fix if ours else f"correct what it names; {sys.executable} -c 'import verl, {plugin['value']}'"
            )
            lines.append(Line(FAIL if ours else WARN, what, f"verl goes on without it: {error}", fix))
        elif not plugin["allowed"]:
            lines.append(_excluded() if ours else Line(FACT, what, f"excluded by {POLICY}"))
        else:
            lines.append(Line(OK, what, "loads"))
    if here:
        lines.append(Line(FAIL, f"{NAME} before verl", f"cannot register its engines: {here}", register_fix))
    return lines


def engine_lines(process: dict[str, Any]) -> list[Line]:
    """The engine class that verl would build, by model type and strategy."""
    set_here = [name for name in ("VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR") if os.environ.get(name)]
    key = f"device {os.environ.get('VERL_ENGINE_DEVICE') or process['device']}"
    key += f", vendor {os.environ.get('VERL_ENGINE_VENDOR') or process['vendor']}"
    fix = f"unset {' '.join(set_here)}" if set_here else "run on an NVIDIA GPU, or export VERL_PLATFORM=cpu"
    # A plugin that is missing, excluded or broken fails in a line of its own.
    works = any(p["name"] == NAME and p["allowed"] and not p["error"] for p in process["plugins"])
    lines = []
    for engine in process["engines"]:
        what, built = f"{engine['model_type']} {engine['strategy']}", engine["built"]
        if built.startswith(f"{NAME}."):
            lines.append(Line(OK, what, f"{built.rpartition('.')[2]} ({key})"))
        else:
            text = f"{built.rpartition('.')[2] or engine['error']}, not ours: nothing would be shared ({key})"
            lines.append(Line(FAIL, what, text, fix) if works else Line(FACT, what, text))
    return lines


def name_lines() -> list[Line]:
    """Names of other packages that look otherwise than where this package was tested."""
    from verl_pg_plugin import compat

    found = [
        Line(FAIL, "names", why, f"pip install {fix}")
        for why, _, fix in (p.partition("; pip install ") for p in compat.problems())
    ]
    return found or [Line(OK, "names", f"all {compat.NUM_NAMES} are as they were")]


def kernel_lines(device: str, available: bool) -> list[Line]:
    """The attention kernels of packed mode, and the one that ``auto`` takes.

    Args:
        device: as verl names it, "cuda" or "cpu".
        available: whether there is such a device; where none is, no kernel is missed.
    """
    from verl_pg_plugin.attention.kernels import KERNELS, kernel_obstacle, select_kernel

    lines = [Line(FACT, name, kernel_obstacle(name, device) or "can run") for name in KERNELS]
    try:
        chosen = select_kernel("auto", device)
    except RuntimeError as error:
        lines.append(Line(FAIL if available else FACT, "auto", str(error), KERNELS["flash_attn_2"].install))
    else:
        lines.append(Line(OK, "auto", f"takes {chosen.name} ({chosen.reason})"))
    return lines


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _requirements() -> list[Requirement]:
    """What this package declares, with the extra that a training needs; empty if it is not installed."""
    try:
        declared = [Requirement(line) for line in requires(PROJECT) or ()]
    except PackageNotFoundError:
        return []
    extras = [{"extra": ""}, {"extra": "trainer"}]
    return [r for r in declared if r.marker is None or any(map(r.marker.evaluate, extras))]


def _is_allowed() -> bool:
    policy = os.environ.get(POLICY, "auto").strip().lower()
    return policy == "auto" or NAME in [name.strip() for name in policy.split(",")]


def _excluded() -> Line:
    text = f"{POLICY}={os.environ[POLICY]} keeps verl from loading it"
    return Line(FAIL, f"plugin {NAME}", text, f"unset {POLICY}, or name {NAME} in it")


# A set of overrides


def compose_config(overrides: list[str]) -> DictConfig:
    """The config that an entry point would run with these overrides: ours, or verl's where they are written for it.

    verl's own config has no section ``prefix_grouper``, so there an option can be added with a ``+``; ``++`` does so
    there and overrides in ours, which comes to the same.

    Raises:
        CommandError: an override that Hydra cannot parse or apply, or an interpolation that leads nowhere.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from verl.utils.device import auto_set_device

    from verl_pg_plugin.config.engage import add_sections
    from verl_pg_plugin.config.keys import OPTIONS

    stock = any(override.startswith(f"+{OPTIONS}.") for override in overrides)
    module, name = ("verl.trainer.config", "ppo_trainer") if stock else (f"{NAME}.config.hydra", "pg_ppo_trainer")
    try:
        with initialize_config_module(module, version_base=None):
            config = compose(name, overrides=overrides)
        if stock:
            add_sections(config)
        OmegaConf.resolve(config.copy())
    except (HydraException, OmegaConfBaseException) as error:
        override = getattr(error, "override", None)  # of one that cannot be parsed
        message = " ".join(str(error).split())
        raise CommandError(f"cannot parse the override {override}: {message}" if override else message) from error
    auto_set_device(config)
    return config


def run_lines(config: DictConfig) -> list[Line]:
    """Mode, attention kernel, compiled layers, activations, and everything that an entry point would say."""
    from omegaconf import OmegaConf
    from verl.utils.device import get_device_name

    from verl_pg_plugin.architectures import rmpad_fault
    from verl_pg_plugin.attention.kernels import ATTENTION_KERNEL, KERNELS, select_kernel
    from verl_pg_plugin.config.checkpoints import read_hf_config
    from verl_pg_plugin.config.keys import ACTOR, MODEL, OPTIONS, USE_PREFIX_GROUPER, USE_REMOVE_PADDING
    from verl_pg_plugin.config.mode import Mode, mode_of
    from verl_pg_plugin.config.preflight import preflight
    from verl_pg_plugin.mixers.attention import attention_needs

    def value(key: str, default: Any = None) -> Any:
        return OmegaConf.select(config, key, default=default)

    mode, device = mode_of(config), get_device_name()
    flags = ", ".join(f"{key}={value(key)}" for key in (USE_PREFIX_GROUPER, USE_REMOVE_PADDING))
    shares = "" if mode.shares_prefixes else f"; {USE_PREFIX_GROUPER}=True shares prefixes"
    lines = [
        Line(OK if mode.shares_prefixes else FACT, "mode", f"{mode.value} ({flags}{shares})"),
        Line(FACT, "trainer", f"V1, mode {config.trainer.v1.trainer_mode}" if config.trainer.use_v1 else "V0"),
        Line(FACT, "strategy of the actor", str(value(f"{ACTOR}.strategy"))),
    ]
    issues = preflight(config)
    hf_config = read_hf_config(config)
    if mode is Mode.RMPAD and hf_config and (fault := rmpad_fault(hf_config, device)):
        issues = [*issues, fault]
    if mode.shares_prefixes and not any(ATTENTION_KERNEL in issue.setting for issue in issues):
        asked = value(ATTENTION_KERNEL, "auto")
        try:
            kernel = select_kernel(asked, device, attention_needs(hf_config.get_text_config()) if hf_config else None)
        except RuntimeError as error:
            fix = KERNELS["flash_attn_2"].install if asked == "auto" else f"++{ATTENTION_KERNEL}=auto"
            lines.append(Line(FAIL, "attention kernel", str(error), fix))
        else:
            lines.append(Line(OK, "attention kernel", f"{kernel.name} ({kernel.reason})"))
    if mode is Mode.PACKED and not any(issue.setting.startswith(f"{OPTIONS}.") for issue in issues):
        lines += [_compiled_line(config, hf_config), _activations_line(config)]
    for issue in issues:
        fix = issue.fix or f"another {MODEL}.path, or {USE_PREFIX_GROUPER}=False (stock verl)"
        text = f"{issue.setting}: {issue.why}" if issue.setting else issue.why
        lines.append(Line(WARN if issue.is_warning else FAIL, "settings", text, fix))
    return lines


def _compiled_line(config: DictConfig, hf_config: Any) -> Line:
    from verl_pg_plugin.config.compile import COMPILE_LAYERS, layer_compilation
    from verl_pg_plugin.config.keys import ACTOR
    from verl_pg_plugin.config.rules import engine_of

    engine = engine_of(config, ACTOR, hf_config)
    if hf_config is None:
        asked = engine.option("compile_layers")
        return Line(FACT, "compiled layers", f"{COMPILE_LAYERS}={asked}: known with a local checkpoint")
    on, reason = layer_compilation(engine)
    if on or engine.device != "cuda":
        return Line(OK, "compiled layers", f"{'yes' if on else 'no'} ({reason})")
    lora = engine.get("strategy") == "fsdp" and engine.of_model("lora_rank")
    fix = f"{ACTOR}.strategy=fsdp2" if lora else f"++{COMPILE_LAYERS}=True, where the reason allows it"
    return Line(WARN, "compiled layers", f"no, an update may take 1.2x to 1.5x as long ({reason})", fix)


def _activations_line(config: DictConfig) -> Line:
    from omegaconf import OmegaConf

    from verl_pg_plugin.config.keys import MODEL, OPTIONS

    asked = OmegaConf.select(config, f"{OPTIONS}.activations", default="auto")
    if not OmegaConf.select(config, f"{MODEL}.enable_gradient_checkpointing", default=False):
        text = "all kept, no gradient checkpointing"
    else:
        kept = "layer inputs are kept, attention is recomputed" if asked == "inputs" else "attention's outputs are kept"
        text = f"{kept} ({OPTIONS}.activations={asked})"
    return Line(OK, "activations", text)


def sharing_lines(config: DictConfig) -> list[Line]:
    """What the longest group that the overrides allow would share, planned and priced as ``estimate`` does."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_reference_policy

    from verl_pg_plugin.architectures import head_obstacle, text_skeleton
    from verl_pg_plugin.config.checkpoints import read_hf_config
    from verl_pg_plugin.config.keys import ACTOR, OPTIONS, REF, ROLLOUT
    from verl_pg_plugin.config.mode import Mode, mode_of
    from verl_pg_plugin.config.rules import sp_size_of
    from verl_pg_plugin.layout import build_packed_layout, build_prefix_order
    from verl_pg_plugin.mixers import MIXERS, count_layers
    from verl_pg_plugin.planning.cost import ModelFlops
    from verl_pg_plugin.planning.forecast import Batch
    from verl_pg_plugin.planning.micro_batches import MicroBatchLimits, cut_micro_batches

    def value(key: str) -> Any:
        return OmegaConf.select(config, key)

    counts = ("data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.n")
    roles = [("update", ACTOR, ACTOR, "ppo_", ""), ("old_log_prob", ROLLOUT, ACTOR, "log_prob_", "log_prob_")]
    if need_reference_policy(config):
        roles.append(("ref", REF, REF, "log_prob_", "log_prob_"))
    limits = {}
    for phase, section, engine, kind, switch in roles:
        by_tokens = bool(value(f"{section}.{switch}use_dynamic_bsz"))
        key = f"{section}.{kind}{'max_token_len_per_gpu' if by_tokens else 'micro_batch_size_per_gpu'}"
        if value(key) is not None:
            limits[key] = phase, by_tokens, engine
    if not limits or any(type(value(key)) is not int or value(key) < 1 for key in (*counts, *limits)):
        return [Line(FACT, "estimate", f"needs {', '.join(counts)}, and budgets, that are counts above 0")]
    prompt, response, n = map(value, counts)
    batch = Batch.of_lengths([prompt], [[response] * n])
    layout = build_packed_layout(batch.tokens, batch.offsets, batch.prompt_lengths)
    fewer = batch.lengths.sum() / layout.num_tokens
    lines = [
        Line(FACT, "longest group", f"{n} responses of {response} tokens to a prompt of {prompt}"),
        Line(FACT, "its tokens", f"{layout.num_tokens} instead of {batch.lengths.sum()}, {fewer:.2f}x fewer"),
    ]
    hf_config = read_hf_config(config)
    if hf_config is not None:
        module = text_skeleton(hf_config)
        flops = ModelFlops.of(module)
        ratio = flops.alone(batch.lengths).sum() / flops.forward([layout])
        lines.append(Line(FACT, "its FLOPs", f"{ratio:.2f}x fewer"))
    if mode_of(config) is not Mode.PACKED:
        return lines
    chunk = f"{OPTIONS}.logits_chunk_size"
    if hf_config is not None and value(chunk) and (why := head_obstacle(module)):
        lines.append(Line(FACT, chunk, f"not in force: logits of all response tokens are held at once ({why})"))
    cannot = [m for m in count_layers(hf_config.get_text_config()) if not MIXERS[m].prefix_cache] if hf_config else []
    carries = value(f"{OPTIONS}.carry") != "never" and not cannot
    order = build_prefix_order(batch.tokens, batch.offsets)
    for key, (phase, by_tokens, engine) in limits.items():
        asked = f"{key}={value(key)}"
        if not by_tokens:
            parts = -(-n // value(key))
        elif (most := value(key) * sp_size_of(config, engine)) < order.num_tokens.max():
            parts = 0
        else:
            parts = len(cut_micro_batches(order, MicroBatchLimits(max_tokens=most)))
        if parts == 1:
            lines.append(Line(OK, phase, f"{asked} holds a whole group"))
        elif not parts:
            lines.append(Line(WARN, phase, f"{asked} does not hold the longest sequence", f"{key}=<more>"))
        elif carries:
            text = f"{asked} splits a group into some {parts} chunks, which read the prefix KV cache of earlier ones"
            lines.append(Line(OK, phase, text))
        else:
            why = f" ({', '.join(cannot)} layers have no prefix KV cache)" if cannot else ""
            text = f"{asked} splits a group into {parts} chunks that each compute the prompt again{why}"
            whole = -(-layout.num_tokens // sp_size_of(config, engine)) if by_tokens else n
            lines.append(Line(WARN, phase, text, f"{key}={whole}" if cannot else f"++{OPTIONS}.carry=auto"))
    return lines
