"""Another package in the places we build on is named, together with whose code runs; verl as released names nobody."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from verl.utils import torch_functional
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_pg_plugin import plugin
from verl_pg_plugin.config import other_packages
from verl_pg_plugin.config.other_packages import edited_files, installed_peers, replacements, say_once

ENGINE = "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead"


def their_wrapper(original: Any) -> Any:
    """A wrapper from another package's file that copies the name and the module of what it wraps."""
    names: dict[str, Any] = {"__name__": "prefix_sharing.setup.patches", "functools": functools}
    exec(
        "def wrap(original):\n"
        "    @functools.wraps(original)\n"
        "    def patched(*args, **kwargs):\n"
        "        return original(*args, **kwargs)\n"
        "    return patched\n",
        names,
    )
    return names["wrap"](original)


@pytest.fixture(autouse=True)
def registered() -> None:
    plugin.register()
    say_once.cache_clear()


def test_verl_as_released_is_nobody_elses() -> None:
    assert replacements() == []
    assert edited_files() == []


@pytest.mark.parametrize(
    ("method", "in_force"),
    [
        ("prepare_model_inputs", "ours where prefixes are shared, theirs in other modes"),
        ("forward_step", "theirs, in every mode, called by ours where prefixes are shared"),
    ],
)
def test_a_replaced_method_of_the_engine_is_named_with_whose_code_runs(
    monkeypatch: pytest.MonkeyPatch, method: str, in_force: str
) -> None:
    monkeypatch.setattr(FSDPEngineWithLMHead, method, their_wrapper(getattr(FSDPEngineWithLMHead, method)))
    (found,) = replacements()
    assert (found.path, found.module) == (f"{ENGINE}.{method}", "prefix_sharing.setup.patches")
    assert found.in_force == in_force


def test_a_replacement_below_a_patch_of_ours_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """``validate_config`` is ours already; somebody was there before."""
    import verl.utils.config as config

    ours = config.validate_config
    assert ours.__globals__["__name__"] == "verl_pg_plugin.upstream.entry_points"
    monkeypatch.setattr(ours, "__wrapped__", their_wrapper(ours.__wrapped__))
    assert [found.path for found in replacements()] == ["verl.utils.config.validate_config"]


def test_a_function_that_our_engines_only_call_is_theirs_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "logprobs_from_logits"
    monkeypatch.setattr(torch_functional, name, their_wrapper(getattr(torch_functional, name)))
    (found,) = replacements()
    assert found.in_force == "theirs, in every mode"


def test_the_process_of_an_engine_says_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FSDPEngineWithLMHead, "forward_step", their_wrapper(FSDPEngineWithLMHead.forward_step))
    from verl_pg_plugin.config import PrefixGrouperEngineConfig

    with caplog.at_level(logging.WARNING):
        PrefixGrouperEngineConfig(strategy="fsdp2")
        assert not caplog.records, "a run that shares nothing is none of our business"
        for _ in range(2):
            PrefixGrouperEngineConfig(strategy="fsdp2", use_prefix_grouper=True)
    (record,) = caplog.records
    assert f"{ENGINE}.forward_step is prefix_sharing.setup.patches's" in record.getMessage()


def test_an_edited_file_of_verl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(sys.modules["verl.workers.engine.fsdp.transformer_impl"].__file__ or "")
    original = other_packages._hash
    monkeypatch.setattr(other_packages, "_hash", lambda path: "x" if path == file else original(path))
    assert edited_files() == [str(file)]


def test_a_known_peer_is_named_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert installed_peers() == []
    (tmp_path / "prefix_sharing.py").write_text("raise ImportError('finding it must not import it')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_peers() == ["prefix_sharing (versatile-ai/PrefixSharing)"]
