"""``patch-model``: install ``modeling_qwen3.py`` in a Qwen3 checkpoint."""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from verl_pg_plugin.cli import CommandError

MODELING_FILE = "modeling_qwen3.py"
SHIPPED_FILE = Path(__file__).parents[1] / "models" / "qwen3" / MODELING_FILE
BACKUP_FILE = "config.json.before_verl_pg_plugin"
AUTO_MAP = {
    "AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM",
    "AutoModelForTokenClassification": "modeling_qwen3.Qwen3ForValue",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "patch-model",
        help="make a Qwen3 checkpoint load this plugin's model under trust_remote_code=True",
        description=f"Copy {MODELING_FILE} into a Qwen3 checkpoint and set auto_map in its config.json.",
    )
    parser.add_argument("checkpoint_dir", type=Path, metavar="CHECKPOINT_DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Patch the checkpoint and print how to undo it."""
    folder: Path = args.checkpoint_dir
    patch(folder)
    undo = f"rename {BACKUP_FILE} to config.json"
    if not (folder / BACKUP_FILE).exists():  # a copy of the folder may lack it
        undo = f"and {' and '.join(AUTO_MAP)} from auto_map in config.json"
    sys.stdout.write(f"{folder}: patched; load it with trust_remote_code=True. Undo: remove {MODELING_FILE}, {undo}\n")


def patch(folder: Path) -> None:
    """Copy the modeling file and set ``auto_map``, or update a patched folder.

    After a CommandError nothing has changed. After an OSError the checkpoint still loads, and another call can finish.
    """
    config_path, modeling, backup = folder / "config.json", folder / MODELING_FILE, folder / BACKUP_FILE
    if not config_path.is_file():
        raise CommandError(f"{folder} has no config.json. Fix: pass the folder of a Qwen3 checkpoint")
    try:
        config = json.loads(config_path.read_text())
    except ValueError as error:
        raise CommandError(f"{config_path} is not JSON: {error}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != "qwen3":
        why = f"model_type is {model_type!r}, not 'qwen3'; other architectures need no patch in packed mode "
        why += "(actor_rollout_ref.model.use_remove_padding=True)"
        raise CommandError(f"{config_path}: {why}")
    auto_map = config.get("auto_map") or {}
    foreign = {name: auto_map[name] for name, ours in AUTO_MAP.items() if auto_map.get(name, ours) != ours}
    if foreign:
        why = f"auto_map in {config_path} already points to {', '.join(foreign.values())}"
        raise CommandError(f"{why}. Fix: remove {' and '.join(foreign)} from it")
    # The file of each release contains this command.
    if modeling.exists() and not backup.exists() and b"verl_pg_plugin patch-model" not in modeling.read_bytes():
        raise CommandError(f"{modeling} exists and patch-model did not write it. Fix: move it away")
    is_mapped = AUTO_MAP.keys() <= auto_map.keys()
    if not (AUTO_MAP.keys() & auto_map.keys() or backup.exists()):
        # Keep a link into a download cache: its target must not change.
        shutil.copy2(config_path, backup, follow_symlinks=False)
    shutil.copyfile(SHIPPED_FILE, modeling)
    if not is_mapped:
        new_config = folder / "config.json.new"
        new_config.write_text(json.dumps({**config, "auto_map": {**auto_map, **AUTO_MAP}}, indent=2) + "\n")
        new_config.replace(config_path)
