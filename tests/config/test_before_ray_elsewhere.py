"""What the checks before Ray say on other machines: with GPUs, in a cluster, with another vLLM or a hub."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.before_ray import hub, machines, rollout
from verl_pg_plugin.config.violation import Violation

GPUS, NODES = "trainer.n_gpus_per_node", "trainer.nnodes"
ADDRESS, RAY_GPUS = "ray_kwargs.ray_init.address", "ray_kwargs.ray_init.num_gpus"


@pytest.fixture
def on_gpus(make_config, monkeypatch) -> Callable[..., list[Violation]]:
    """What is said of a config on a machine with so many GPUs."""

    def said(there: int, **settings: object) -> list[Violation]:
        monkeypatch.setattr(machines, "get_device_name", lambda: "cuda")
        monkeypatch.setattr(machines.torch.cuda, "device_count", lambda: there)
        keys = {name.replace("__", "."): value for name, value in settings.items()}
        config = make_config(Mode.PACKED, {RAY_GPUS: None, ADDRESS: "local", **keys})
        return [found for found in machines.machine_violations(config) if found.rule == "gpus"]

    return said


@pytest.mark.parametrize(
    ("there", "fix"), [(8, None), (4, None), (3, f"{GPUS}=3"), (0, "run where nvidia-smi lists enough")]
)
def test_more_gpus_than_there_are_is_told_with_the_number_that_there_is(on_gpus, there: int, fix: str | None) -> None:
    found = on_gpus(there, trainer__n_gpus_per_node=4)
    assert [violation.fix[: len(fix or "")] for violation in found] == ([fix] if fix else [])
    assert all(f"4 GPUs are asked for, and {there} are there" in violation.why for violation in found)


def test_gpus_of_a_rollout_of_its_own_count(on_gpus) -> None:
    separate = {
        "trainer__v1__trainer_mode": "separate_async",
        "actor_rollout_ref__rollout__nnodes": 1,
        "actor_rollout_ref__rollout__n_gpus_per_node": 2,
        "trainer__n_gpus_per_node": 3,
    }
    (violation,) = on_gpus(4, **separate)
    assert "5 GPUs are asked for, 2 of them by actor_rollout_ref.rollout, and 4 are there" in violation.why
    assert violation.fix == f"{GPUS}=2"
    assert on_gpus(5, **separate) == []


def test_what_ray_is_told_counts_and_a_word_there_is_rays_to_refuse(on_gpus) -> None:
    assert on_gpus(0, trainer__n_gpus_per_node=4, ray_kwargs__ray_init__num_gpus=4) == []
    assert on_gpus(0, trainer__n_gpus_per_node=4, ray_kwargs__ray_init__num_gpus="four") == []


def test_a_cluster_knows_its_own_gpus(on_gpus, monkeypatch, tmp_path) -> None:
    assert on_gpus(0, trainer__nnodes=2) == []
    assert on_gpus(0, ray_kwargs__ray_init__address="auto") == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert on_gpus(0, ray_kwargs__ray_init__address=None) == []
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert len(on_gpus(0, ray_kwargs__ray_init__address=None)) == 1
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert on_gpus(0, ray_kwargs__ray_init__address=None) == []


@pytest.mark.parametrize(("installed", "refused"), [("0.17.1", True), ("0.18.0", False), ("0.24.0", False)])
def test_a_vllm_that_verl_refuses_is_told_before(make_config, monkeypatch, installed: str, refused: bool) -> None:
    monkeypatch.setattr(rollout, "version", lambda name: installed)
    found = list(rollout.rollout_violations(make_config(Mode.PACKED, {rollout.NAME: "vllm"})))
    assert [violation.why for violation in found] == (
        [f"vllm {installed} is older than the lowest that verl takes, 0.18.0"] if refused else []
    )


def test_verls_own_extra_names_the_version_to_install() -> None:
    assert rollout._verls_own("vllm") == next(
        f"{line.partition('==')[0]}=={line.partition('==')[2].partition(';')[0].strip()}"
        for line in metadata.requires("verl") or ()
        if line.startswith("vllm==")
    )


def answer(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (RepositoryNotFoundError("gone", response=answer(404)), "is neither a folder nor a model that https://"),
        (GatedRepoError("gated", response=answer(403)), "is gated on https://"),
        (httpx.ConnectError("Name or service not known"), "cannot be reached from here: Name or service not known"),
        (None, None),
    ],
    ids=["unknown", "gated", "no network", "there"],
)
def test_what_the_hub_says_of_a_model_is_said_before(make_config, monkeypatch, raised, why: str | None) -> None:
    def model_info(self: HfApi, repo: str, timeout: float) -> SimpleNamespace:
        assert (repo, timeout) == ("somebody/model", hub.TIMEOUT_S)
        if raised:
            raise raised
        return SimpleNamespace()

    monkeypatch.setattr(HfApi, "model_info", model_info)
    config = make_config(Mode.PACKED, {"actor_rollout_ref.model.path": "somebody/model"})
    found = list(hub.hub_violations(config))
    assert len(found) == (0 if why is None else 1)
    assert all(why in violation.why for violation in found if why)
    config.trainer.nnodes = 2
    assert list(hub.hub_violations(config)) == [], "another node may reach it"


def test_a_model_in_the_cache_is_not_asked_for_and_its_architecture_is_looked_at(
    make_config, monkeypatch, folders
) -> None:
    from rule_cases import GEMMA2

    from verl_pg_plugin.config import checkpoint_checks

    config_json = f"{folders[GEMMA2]}/config.json"
    monkeypatch.setattr(checkpoint_checks, "try_to_load_from_cache", lambda repo, name: config_json)
    monkeypatch.setattr(HfApi, "model_info", None)
    config = make_config(Mode.PACKED, {"actor_rollout_ref.model.path": "somebody/model"})
    assert list(hub.hub_violations(config)) == []
    (violation,) = checkpoint_checks.checkpoint_violations(config)
    assert violation.rule == "attention_kernel_model"
