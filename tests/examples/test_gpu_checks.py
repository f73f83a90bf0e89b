"""What a machine lacks for a run on GPUs is one line with its fix and exit code 2, before Ray starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import check_gpu_run  # noqa: E402
from check_gpu_run import (  # noqa: E402
    MissingForGPURunError,
    check_attention,
    check_gpus,
    check_model,
    check_rollout,
    error_of_attention,
    last_overrides,
    read_head_dim,
)
from verl_pg_plugin.attention.kernels.sdpa import attend as attend_sdpa  # noqa: E402

from verl_pg_plugin.attention.kernels import Kernel  # noqa: E402


def test_a_missing_rollout_engine_is_named_with_the_version_to_install() -> None:
    with pytest.raises(MissingForGPURunError, match=r"vLLM is not installed.*pip install vllm==0\.24\.0"):
        check_rollout("vllm")


def test_a_version_that_verl_refuses_is_refused_here_and_its_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu_run, "version", lambda package: "0.17.1")
    with pytest.raises(MissingForGPURunError, match=r"vLLM 0\.17\.1 is older.*0\.18\.0"):
        check_rollout("vllm")
    monkeypatch.setattr(check_gpu_run, "version", lambda package: "0.24.0+cu130")
    check_rollout("vllm")


def test_the_versions_are_those_of_the_installed_verl() -> None:
    from importlib.metadata import requires

    import verl.third_party

    source = (Path(verl.third_party.__file__).parent / "vllm" / "__init__.py").read_text()
    assert f'vs.parse("{check_gpu_run.LOWEST_VLLM}")' in source
    wanted = [line for line in requires("verl") or [] if line.startswith("vllm") and 'extra == "vllm"' in line]
    assert [line.split(";")[0].strip() for line in wanted] == [f"vllm=={check_gpu_run.VERLS_VLLM}"]


def test_another_engine_is_left_to_verl() -> None:
    check_rollout("sglang")


def test_no_gpu_and_too_few_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(MissingForGPURunError, match="no GPU is visible"):
        check_gpus(8, 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(MissingForGPURunError, match="set NGPUS_PER_NODE=2"):
        check_gpus(8, 1)
    check_gpus(2, 1)


def test_gpus_of_a_cluster_are_rays_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_gpus(8, 2)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_gpus(8, 1)


def test_a_model_folder_without_its_parts_is_named_with_the_missing_part(tmp_path: Path) -> None:
    with pytest.raises(MissingForGPURunError, match=r"none does not exist: correct MODEL_PATH"):
        check_model(str(tmp_path / "none"), None)
    with pytest.raises(MissingForGPURunError, match=r"has no config\.json"):
        check_model(str(tmp_path), None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingForGPURunError, match=r"has no tokenizer.*tokenizer_path=FOLDER"):
        check_model(str(tmp_path), None)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_model(str(tmp_path), None)


def test_a_tokenizer_folder_of_its_own_counts_instead_of_the_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    with pytest.raises(MissingForGPURunError, match="tokenizer has no tokenizer"):
        check_model(str(tmp_path), str(tokenizer))
    (tokenizer / "tokenizer.model").write_text("")
    check_model(str(tmp_path), str(tokenizer))


def test_a_name_of_a_hub_is_left_to_transformers() -> None:
    check_model("Qwen/Qwen3-4B", None)


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"head_dim": 64, "hidden_size": 1024, "num_attention_heads": 4}, 64),
        ({"head_dim": None, "hidden_size": 1024, "num_attention_heads": 8}, 128),
        ({"text_config": {"head_dim": 96}}, 96),
        ({"model_type": "mamba"}, None),
    ],
    ids=["named", "divided", "nested", "no heads"],
)
def test_the_width_of_a_head_is_read_from_the_config(tmp_path: Path, config: dict[str, Any], width: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_head_dim(str(tmp_path)) == width
    assert read_head_dim("Qwen/Qwen3-4B") is None


def lacking(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("this flash-attn was built\nwithout headdim 32")


def pretend_kernel(monkeypatch: pytest.MonkeyPatch, attend: Callable[..., torch.Tensor]) -> list[str]:
    """The kernel that any name selects; returns the names that were asked for."""
    asked: list[str] = []

    def select(name: str, device_type: str) -> Kernel:
        asked.append(name)
        return Kernel("flash_attn_2", "", attend)

    monkeypatch.setattr(check_gpu_run, "select_kernel", select)
    monkeypatch.setattr(check_gpu_run, "DEVICE", "cpu")
    return asked


def test_heads_that_the_installed_kernels_lack_are_named_with_the_override_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_kernel(monkeypatch, lacking)
    with pytest.raises(MissingForGPURunError, match=r"^this .* headdim 32; or add .*attention_kernel=torch_varlen$"):
        check_attention(32, packed=True)
    with pytest.raises(MissingForGPURunError, match=r"headdim 32; or add .*attn_implementation=sdpa$"):
        check_attention(32, packed=False)


def test_a_kernel_that_returns_nonsense_for_a_width_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernel(monkeypatch, lambda q, k, v, *_, **__: v * 0.5)
    with pytest.raises(MissingForGPURunError, match=r"flash_attn_2 is wrong by .* heads of 32 numbers"):
        check_attention(32, packed=True)


def test_attention_that_works_passes_and_the_runs_own_kernel_is_the_one_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend_kernel(monkeypatch, attend_sdpa)
    assert error_of_attention(attend_sdpa, 64) < 1e-2
    check_attention(64, packed=True, kernel="torch_varlen")
    check_attention(64, packed=False)
    check_attention(64, packed=False, model_attention="sdpa")
    assert asked == ["torch_varlen", "flash_attn_2"]


def test_the_last_of_several_overrides_wins_and_plus_signs_do_not_matter() -> None:
    overrides = ["trainer.nnodes=1", "++trainer.nnodes=2", "+a.b='x'", "~dropped"]
    assert last_overrides(overrides) == {"trainer.nnodes": "2", "a.b": "x"}


def run_script(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["bash", str(REPOSITORY / "examples" / "run_qwen3_pg.sh"), *arguments],
        env={**inherited, "WORK_DIR": str(tmp_path / "work"), "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "data.parquet").write_text("")
    (tmp_path / "config.json").write_text("{}")
    return {name: str(tmp_path / "data.parquet") for name in ("TRAIN_FILES", "VAL_FILES")} | {
        "MODEL_PATH": str(tmp_path)
    }


def test_the_script_ends_with_one_error_line_and_exit_code_2(tmp_path: Path, inputs: dict[str, str]) -> None:
    done = run_script(tmp_path, **inputs)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path} has no tokenizer")
    assert "Traceback" not in done.stderr


def test_overrides_reach_the_check(tmp_path: Path, inputs: dict[str, str]) -> None:
    done = run_script(tmp_path, "actor_rollout_ref.model.path=/none/model", **inputs)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: model folder /none/model does not exist")


def test_a_device_that_does_not_exist_is_named(tmp_path: Path, inputs: dict[str, str]) -> None:
    done = run_script(tmp_path, DEVICE="tpu", **inputs)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: DEVICE=tpu is neither cpu nor gpu"


@pytest.mark.parametrize(
    "script", ["run_qwen3_pg.sh", "run_qwen3_rmpad.sh", "run_qwen3_tools_pg.sh", "run_qwen3_agent_pg.sh"]
)
def test_help_lists_every_variable_that_the_script_reads_and_starts_nothing(tmp_path: Path, script: str) -> None:
    done = subprocess.run(
        ["bash", str(REPOSITORY / "examples" / script), "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []
    source = (REPOSITORY / "examples" / "run_qwen3_pg.sh").read_text()
    internal = {"BASH_SOURCE", "OMP_NUM_THREADS", "!name"}
    read = {part.split(":-")[0] for part in source.split("${")[1:] if ":-" in part.split("}")[0]} - internal
    assert read >= {"MODEL_PATH", "NGPUS_PER_NODE", "LR"}
    assert not {name for name in read if name not in done.stdout}
