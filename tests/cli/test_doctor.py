"""``python -m verl_pg_plugin doctor``: what it says of a machine and of overrides, and its exit codes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import DictConfig

from tests.config import config_support
from tests.support import save_tiny_model
from verl_pg_plugin import compat
from verl_pg_plugin.__main__ import main
from verl_pg_plugin.cli import CommandError, doctor
from verl_pg_plugin.cli.doctor import FAIL, OK, WARN, Line, compose_config, run_lines, sharing_lines
from verl_pg_plugin.config import compile, rules
from verl_pg_plugin.config.checkpoints import read_hf_config
from verl_pg_plugin.layout import build_prefix_order
from verl_pg_plugin.planning.forecast import Batch
from verl_pg_plugin.planning.micro_batches import MicroBatchLimits, cut_micro_batches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="asserts what the CPU default reports")

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
BUDGET = f"{ACTOR}.ppo_max_token_len_per_gpu"
PROCESS = {
    "engines": [],
    "plugins": [{"name": "verl_pg_plugin", "value": "verl_pg_plugin", "allowed": True, "error": ""}],
    "platform": "CPUPlatform",
    "device": "cpu",
    "vendor": "cpu",
    "available": True,
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that leave nothing to object to."""
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(path)
    (path / "tokenizer.json").write_text("{}")
    row = {"prompt": [{"role": "user", "content": "2+2"}], "data_source": "sum", "reward_model": {"ground_truth": "4"}}
    pq.write_table(pa.Table.from_pylist([row] * 8), path / "rows.parquet")
    return [
        f"data.train_files={path}/rows.parquet",
        f"data.val_files={path}/rows.parquet",
        "data.train_batch_size=8",
        "trainer.n_gpus_per_node=4",
        "trainer.logger=console",
        "+ray_kwargs.ray_init.num_gpus=4",
        "+ray_kwargs.ray_init.address=local",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"actor_rollout_ref.model.path={path}",
        f"{ACTOR}.use_prefix_grouper=True",
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{BUDGET}=8192",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.name=hf",
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=1024",
        "data.max_response_length=256",
        "trainer.device=cpu",
    ]


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composing verl's config anew takes a second each time."""

    def compose(name: str, overrides: list[str]) -> DictConfig:
        module = "verl.trainer.config" if name == "ppo_trainer" else "verl_pg_plugin.config.hydra"
        return config_support.compose_config(*overrides, module=module, name=name)

    monkeypatch.setattr("hydra.initialize_config_module", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr("hydra.compose", compose)


def broken_plugin(folder: Path, code: str) -> None:
    """An installed plugin of verl's whose module runs ``code`` when it is loaded."""
    metadata = folder / "broken_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nbroken_plugin = broken_plugin\n")
    (folder / "broken_plugin.py").write_text(code)


def bad(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.state in (WARN, FAIL)]


def text_of(lines: list[Line], what: str) -> str:
    return " ".join(line.text for line in lines if line.what == what)


# The command


def test_a_healthy_machine_has_one_verdict_and_sees_what_a_worker_of_verl_sees(capsys) -> None:
    assert main(["doctor", "--full"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == "OK: 0 failing, 0 to look at"
    assert any(line.startswith(f"OK torch {torch.__version__} (supported: ") for line in lines)
    assert "OK plugin verl_pg_plugin loads" in lines
    assert "OK language_model fsdp2 PrefixGrouperFSDPEngineWithLMHead (device cpu, vendor cpu)" in lines
    assert "OK auto takes sdpa (prefix_grouper.attention_kernel=auto on device cpu)" in lines
    assert "With these overrides" not in lines


def test_every_failing_line_has_its_fix_below_it_and_the_exit_code_is_1(capsys, packed, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "fresh_process", lambda: PROCESS)
    asked = ["+prefix_grouper.logits_chunk_size=abc", f"{ACTOR}.qat.enable=True"]
    assert main(["doctor", *packed, *asked]) == 1
    lines = capsys.readouterr().out.splitlines()
    (place,) = (i for i, line in enumerate(lines) if f"{ACTOR}.qat.enable=True" in line)
    assert lines[place].startswith("  FAIL")
    assert lines[place + 1] == f"        fix: {ACTOR}.qat.enable=False"
    assert any("prefix_grouper.logits_chunk_size=abc: is not an integer" in line for line in lines)
    assert lines[-1].startswith("FAIL: 2 failing")


def test_a_warning_leaves_the_exit_code_0_and_no_line_is_wrapped(capsys) -> None:
    assert doctor.show([("Title", [Line(OK, "a", "b"), Line(WARN, "c", "slow", "faster")])]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "WARN: 0 failing, 1 to look at"
    assert doctor.show([("Title", [Line(FAIL, "c", "x" * 300, "y" * 300)])]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("x" * 300)
    assert lines[2] == "        fix: " + "y" * 300


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ACTOR}.strategy=[", "strategy=["),
        (f"{ACTOR}.clip_ratio=${{no.such.key}}", "no.such.key"),
        ("model_engine=no_such_engine", "no_such_engine"),
        (f"{ACTOR}.no_such_key=1", f"Could not override '{ACTOR}.no_such_key'"),
    ],
    ids=["parse", "interpolation", "group", "key"],
)
def test_every_kind_of_wrong_override_is_one_line(override: str, message: str) -> None:
    with pytest.raises(CommandError) as caught:
        compose_config([override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor"]])
def test_what_needs_no_training_is_there_at_once_and_without_noise(arguments: list[str]) -> None:
    """Two seconds of CPU: an import of verl or torch takes more."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "verl_pg_plugin", *arguments], capture_output=True, text=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


# The machine


def test_packages_outside_the_supported_range_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bad(doctor.version_lines()) == []
    old = tmp_path / "transformers-5.6.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.6.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = bad(doctor.version_lines())
    assert line.text.startswith("5.6.0 is outside the supported range")
    assert line.fix.startswith("pip install 'transformers")


def test_a_machine_without_gpu_or_kernel_fails_with_and_without_full(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bad(doctor.installed_lines()) == []
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    (line,) = bad(doctor.installed_lines())
    assert (line.state, line.what) == (FAIL, "GPU")
    (full,) = bad(doctor.plugin_lines({**PROCESS, "platform": "PlatformCUDA", "device": "cuda", "available": False}))
    assert (full.state, full.fix) == (FAIL, line.fix)
    monkeypatch.setattr(doctor, "gpus", lambda: ["NVIDIA H200, 570.1, 9.0, 143771 MiB"])
    (line,) = bad(doctor.installed_lines())
    (full,) = bad(doctor.kernel_lines("cuda", available=True))
    assert line.fix == full.fix == "pip install --no-build-isolation flash-attn"
    assert bad(doctor.kernel_lines("cuda", available=False)) == []


def test_a_name_of_another_package_that_is_gone_fails_with_the_version_to_install(monkeypatch) -> None:
    monkeypatch.setattr(compat, "problems", lambda: ["torch 2.20: a.b is gone; needed for c; pip install 'torch<2.14'"])
    (line,) = bad(doctor.name_lines())
    assert (line.text, line.fix) == ("torch 2.20: a.b is gone; needed for c", "pip install 'torch<2.14'")


def test_a_plugin_that_verl_may_not_load_or_does_not_find_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    excluded = {**PROCESS, "plugins": [{**PROCESS["plugins"][0], "allowed": False}]}  # type: ignore[index]
    for lines in (doctor.installed_lines(), doctor.plugin_lines(excluded)):
        (line,) = bad(lines)
        assert line.fix == "unset VERL_USE_EXTERNAL_PLUGINS, or name verl_pg_plugin in it"
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other, verl_pg_plugin")
    assert bad(doctor.installed_lines()) == []
    (line,) = bad(doctor.plugin_lines({**PROCESS, "plugins": []}))
    assert "pip install <folder of this repository>" in line.fix


def test_environment_variables_that_put_another_engine_in_force_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "npu")
    stock = {"model_type": "language_model", "strategy": "fsdp2", "built": "verl.NPUEngine", "error": ""}
    (line,) = bad(doctor.engine_lines({**PROCESS, "engines": [stock]}))
    assert "NPUEngine, not ours" in line.text
    assert "device npu" in line.text
    assert line.fix == "unset VERL_ENGINE_DEVICE"
    broken = [{**PROCESS["plugins"][0], "error": "gone"}]  # type: ignore[index]
    assert bad(doctor.engine_lines({**PROCESS, "engines": [stock], "plugins": broken})) == [], (
        "the plugin fails, not this"
    )


@pytest.mark.parametrize(
    ("script", "error"),
    [("import os; os.kill(os.getpid(), 9)", "ended with -9"), ("import time; time.sleep(60)", "more than 1 s")],
    ids=["killed", "hanging"],
)
def test_an_import_of_verl_that_never_returns_fails(script: str, error: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(doctor, "SCRIPT", tmp_path / "script.py")
    monkeypatch.setattr(doctor, "TIMEOUT_S", 1)
    (line,) = bad(doctor.plugin_lines(doctor.fresh_process()))
    assert error in line.text


def test_a_platform_that_verl_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "no_such")
    (line,) = bad(doctor.plugin_lines({"error": "ValueError: Unknown platform 'no_such'"}))
    assert line.fix.startswith("unset VERL_PLATFORM")


def test_what_keeps_plugins_from_loading_is_reported_by_the_command(tmp_path: Path) -> None:
    """verl says so at DEBUG only; Python runs ``sitecustomize`` when it starts, so ours fails as if half removed."""
    broken_plugin(tmp_path, "import no_such_package\n")
    gone = "import sys; sys.modules['verl_pg_plugin.engine.engine'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(gone)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-W", "ignore", "-m", "verl_pg_plugin", "doctor", f"{ROLLOUT}.n=4"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    failing = [line for line in done.stdout.splitlines() if line.startswith("  FAIL")]
    assert any("import of verl_pg_plugin.engine.engine halted" in line for line in failing)
    (other,) = (line for line in done.stdout.splitlines() if line.startswith("  WARN"))
    assert "No module named 'no_such_package'" in other


# Overrides


def test_mode_kernel_compiled_layers_and_activations_follow_the_overrides(packed: list[str]) -> None:
    lines = run_lines(compose_config(packed))
    assert bad(lines) == []
    assert text_of(lines, "mode").startswith("packed (")
    assert text_of(lines, "attention kernel").startswith("sdpa (")
    assert text_of(lines, "compiled layers").startswith(
        "no (prefix_grouper.compile_layers=auto: compiling pays on a GPU"
    )
    assert text_of(lines, "activations").startswith("attention's outputs are kept")
    other = ["prefix_grouper.compile_layers=True", "prefix_grouper.activations=inputs"]
    lines = run_lines(compose_config([*packed, *other]))
    assert text_of(lines, "compiled layers").startswith("yes (")
    assert "attention is recomputed" in text_of(lines, "activations")
    stock = run_lines(compose_config([*packed, f"{ACTOR}.use_prefix_grouper=False"]))
    assert text_of(stock, "mode").startswith("rmpad (")
    assert not text_of(stock, "attention kernel") + text_of(stock, "compiled layers")


def test_layers_that_stay_uncompiled_on_a_gpu_are_a_warning_with_its_fix(packed: list[str], monkeypatch) -> None:
    monkeypatch.setattr(rules, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(compile, "compiler_obstacle", lambda *asked: "")
    config = compose_config([*packed, f"{ACTOR}.strategy=fsdp", f"{MODEL}.lora_rank=8"])
    line = doctor._compiled_line(config, read_hf_config(config))
    assert (line.state, line.fix) == (WARN, f"{ACTOR}.strategy=fsdp2")
    config.actor_rollout_ref.model.lora_rank = 0
    assert doctor._compiled_line(config, read_hf_config(config)).state == OK


def test_what_verl_itself_rejects_fails(packed: list[str]) -> None:
    (line,) = bad(run_lines(compose_config([*packed, f"{ACTOR}.loss_agg_mode=no-such-mode"])))
    assert "no-such-mode" in line.text


def test_sharing_is_told_for_the_longest_group_and_every_phase(packed: list[str]) -> None:
    lines = sharing_lines(compose_config([*packed, f"{ACTOR}.use_kl_loss=True"]))
    assert bad(lines) == []
    assert text_of(lines, "its tokens") == "2047 instead of 5120, 2.50x fewer"
    assert "x fewer" in text_of(lines, "its FLOPs")
    assert text_of(lines, "update") == f"{BUDGET}=8192 holds a whole group"
    assert text_of(lines, "ref")
    assert not text_of(sharing_lines(compose_config(packed)), "ref")


@pytest.mark.parametrize(
    ("overrides", "state", "said"),
    [
        ([f"{BUDGET}=1600"], OK, "chunks, which read the prefix KV cache"),
        ([f"{BUDGET}=1600", "prefix_grouper.carry=never"], WARN, "2 chunks that each compute the prompt again"),
        ([f"{BUDGET}=1200"], WARN, "does not hold the longest sequence"),
        ([f"{BUDGET}=1200", f"{ACTOR}.ulysses_sequence_parallel_size=2"], OK, "holds a whole group"),
        ([f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"], OK, "which read the prefix KV"),
    ],
    ids=["split", "never", "too small", "two GPUs share a sequence", "fixed"],
)
def test_budgets_that_split_a_group_are_told_and_warned_of_where_nothing_is_carried(
    packed: list[str], overrides: list[str], state: str, said: str
) -> None:
    (line,) = (line for line in sharing_lines(compose_config([*packed, *overrides])) if line.what == "update")
    assert line.state == state
    assert said in line.text


@pytest.mark.parametrize("override", [f"{ROLLOUT}.n=four", f"{ROLLOUT}.n=0", f"{BUDGET}=8k"])
def test_a_count_that_is_none_leaves_no_estimate_and_no_traceback(packed: list[str], override: str) -> None:
    (line,) = sharing_lines(compose_config([*packed, override]))
    assert line.what == "estimate"


def test_the_chunks_that_are_told_are_those_of_the_planner(packed: list[str]) -> None:
    batch = Batch.of_lengths([1024], [[256] * 4])
    order = build_prefix_order(batch.tokens, batch.offsets)
    for budget in (1300, 1600, 2047):
        lines = sharing_lines(compose_config([*packed, f"{BUDGET}={budget}", "prefix_grouper.carry=never"]))
        parts = len(cut_micro_batches(order, MicroBatchLimits(max_tokens=budget)))
        assert (f"into {parts} chunks" if parts > 1 else "holds a whole group") in text_of(lines, "update")


def test_a_head_that_is_not_cut_in_chunks_is_told(packed: list[str], tmp_path: Path) -> None:
    cohere = f"actor_rollout_ref.model.path={save_tiny_model(tmp_path, 'cohere', pad_token_id=0)}"
    option = "prefix_grouper.logits_chunk_size"
    assert "(CohereForCausalLM changes" in text_of(sharing_lines(compose_config([*packed, cohere])), option)
    assert not text_of(sharing_lines(compose_config([*packed, cohere, f"{option}=0"])), option)
