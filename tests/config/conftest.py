"""A trainer config that can run, on an existing checkpoint, for tests that break one setting at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from transformers import Gemma2Config, Olmo2Config, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig, Qwen3VLConfig

from tests.config.config_support import FLAGS, TINY, compose_config, parse, runnable, save_checkpoint
from verl_pg_plugin.config import Mode, compile, rules
from verl_pg_plugin.config.keys import USE_PREFIX_GROUPER, USE_REMOVE_PADDING


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for config in (
        Gemma2Config(**TINY),
        Olmo2Config(**TINY),
        Qwen3Config(**TINY),
        Qwen3MoeConfig(**TINY),
        Qwen3NextConfig(**TINY, layer_types=["linear_attention", "full_attention"]),
        Qwen3VLConfig(text_config=TINY),
    ):
        save_checkpoint(folder / config.model_type, config)
    return folder


@pytest.fixture(scope="session")
def checkpoint(models: Path) -> Path:
    return models / "qwen3"


@pytest.fixture(scope="session")
def runnable_overrides(checkpoint: Path) -> list[str]:
    return runnable(checkpoint)


@pytest.fixture(scope="session")
def places(tmp_path_factory, checkpoint: Path, models: Path) -> dict[str, Path]:
    """Paths that overrides name in braces."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "own").mkdir()
    (folder / "own" / "config.json").write_text(
        '{"model_type": "my_own", "vision_config": {}, "auto_map": {"AutoConfig": "own.Own"}}'
    )
    return {"checkpoint": checkpoint, "models": models, "own": folder / "own"}


@pytest.fixture
def config_of(runnable_overrides: list[str], places: dict[str, Path]) -> Callable[..., DictConfig]:
    """Build a runnable config in a mode, with blank-separated overrides or ``{key: value}`` on top."""

    def make(overrides: str | dict[str, Any] = "", mode: Mode = Mode.PACKED, **more: Any) -> DictConfig:
        config = compose_config(*runnable_overrides)
        shares, unpadded = FLAGS[mode]
        flags = {USE_PREFIX_GROUPER: shares, USE_REMOVE_PADDING: unpadded, "critic.model.use_remove_padding": unpadded}
        given = parse(overrides.format(**places)) if isinstance(overrides, str) else overrides
        for key, value in {**flags, **more, **given}.items():
            OmegaConf.update(config, key, value, force_add=True)
        return config

    return make


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "get_device_name", lambda: "cuda")
    for module in (compile, rules):
        monkeypatch.setattr(module, "compiler_obstacle", lambda *_: "")
