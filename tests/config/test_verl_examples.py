"""Each of verl's FSDP example scripts, with the flag added, runs or is refused for the reason in the table."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.config.config_support import SHARED, TINY, VERL_EXAMPLES, example_settings, save_checkpoint
from verl_pg_plugin.config import compile, preflight, rules
from verl_pg_plugin.config.keys import ACTOR

SCRIPTS = VERL_EXAMPLES["scripts"]
SIZES: dict[str, dict[str, Any]] = {name: {"text_config": TINY} for name in ("glm4v", "qwen2_5_vl", "qwen3_vl")}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, types = tmp_path_factory.mktemp("examples"), {script["model"] for script in SCRIPTS.values()}
    configs = {name: transformers.CONFIG_MAPPING[name](**SIZES.get(name, TINY)) for name in types}
    return {name: save_checkpoint(folder / name, config) for name, config in configs.items()}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", SCRIPTS)
def test_verls_examples_run_or_are_refused_with_their_reason(name: str, checkpoints, config_of, monkeypatch) -> None:
    find, there = importlib.util.find_spec, importlib.util.find_spec("torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there if name == "flash_attn" else find(name))
    script = SCRIPTS[name]
    path = str(checkpoints[script["model"]])
    made = {"actor_rollout_ref.model.path": path, "critic.model.path": path}
    config = config_of(SHARED | made | example_settings(script.get("sets", "")))
    errors = [issue for issue in preflight.preflight(config) if not issue.is_warning]
    if "refused" not in script:
        assert errors == []
        hf_config = transformers.AutoConfig.from_pretrained(path)
        compiles, _ = compile.layer_compilation(rules.engine_of(config, ACTOR, hf_config))
        assert compiles == ("note" not in script)
    else:
        assert any(script["refused"] in issue.why and script["way"] in issue.fix for issue in errors), errors


def test_support_page_names_refused_and_uncompiled_examples() -> None:
    page = (Path(__file__).parents[2] / "docs/support.md").read_text()
    runs = sum("refused" not in script for script in SCRIPTS.values())
    _, rest = page.split(f"{runs} of {len(SCRIPTS)} run. Run with layers uncompiled: ")
    uncompiled, refused = rest.split("\n\n", 1)
    for name, script in SCRIPTS.items():
        file = f"`{name}_fsdp.sh`"
        if "refused" in script:
            assert re.search(rf"\| {file} \| {script['refused']} \| `?{script['way']}", refused), name
        else:
            assert (file in uncompiled) == ("note" in script), name
