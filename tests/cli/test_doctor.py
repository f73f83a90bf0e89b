"""``doctor``: its checks of a machine and of overrides, and its exit codes."""

import json
import resource
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import verl

from tests.config import config_support
from tests.fresh import run_fresh
from verl_pg_plugin import compat
from verl_pg_plugin.__main__ import main
from verl_pg_plugin.cli import FAIL, OK, WARN, Check, CommandError, doctor, overrides
from verl_pg_plugin.cli.overrides import compose_config, run_lines
from verl_pg_plugin.config.keys import ACTOR, MODEL

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="asserts what the CPU default reports")

PLATFORM = {"status": OK, "what": "platform", "text": "CPUPlatform"}
PROCESS = {"device": "cpu", "platform": PLATFORM, "plugin_error": "", "engines": []}

HOLDS_OUR_KEY = """
from verl.workers.engine.base import BaseEngine, EngineRegistry

@EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")
class Theirs(BaseEngine): ...
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Reports of workers: healthy, another VERL_ENGINE_DEVICE, an engine that does not import, a rival plugin."""
    folder = tmp_path_factory.mktemp("rival")
    metadata = folder / "rival-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nrival = rival_plugin\n")
    (folder / "rival_plugin.py").write_text(HOLDS_OUR_KEY)
    broken, rival = "sys.modules['verl_pg_plugin.engine.engine'] = None", f"sys.path.insert(0, {str(folder)!r})"
    other = "import os; os.environ['VERL_ENGINE_DEVICE'] = 'npu'; report_process(True)"
    cases = [("", other, "cpu"), (broken, "", "cpu"), (rival, "", "nvidia")]
    ended = run_fresh([(f"import sys\n{a}\n{doctor.SCRIPT}\n{b}", {"VERL_PLATFORM": name}) for a, b, name in cases])
    return [json.loads(line) for process in ended for line in process.stdout.splitlines() if line.startswith('{"dev')]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = config_support.save_checkpoint(tmp_path_factory.mktemp("qwen3"))
    return [
        *config_support.runnable(path),
        "trainer.n_gpus_per_node=4",
        "++ray_kwargs.ray_init.num_gpus=4",
        f"{ACTOR}.use_prefix_grouper=True",
        f"{ACTOR}.use_kl_loss=False",
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
        "data.max_prompt_length=1024",
        "data.max_response_length=256",
        "trainer.device=cpu",
    ]


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composing verl's config takes a second."""
    monkeypatch.setattr(overrides, "initialize_config_dir", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(overrides, "compose", lambda name, overrides: config_support.compose_config(*overrides))


def bad(lines: list[Check]) -> list[Check]:
    return [line for line in lines if line.status in (WARN, FAIL)]


def line_of(lines: list[Check], what: str) -> Check:
    (line,) = (line for line in lines if line.what == what)
    return line


def test_healthy_machines_are_ready(capsys, processes, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "fresh_process", lambda: processes[0])
    assert main(["doctor", "--full"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == "prefix sharing: ready"
    assert any(line.startswith(f"OK torch {torch.__version__} (supported: ") for line in lines)
    assert "OK plugin verl_pg_plugin loads" in lines
    assert "OK language_model fsdp2 PrefixGrouperFSDPEngineWithLMHead" in lines
    assert "OK attention kernel sdpa (++prefix_grouper.attention_kernel=auto on device cpu)" in lines
    assert "With these overrides" not in lines


def test_failures_print_their_fix_and_exit_with_1(capsys, packed, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "fresh_process", lambda: PROCESS)
    key = f"{MODEL}.fused_kernel_options.impl_backend"
    wrong = ["+prefix_grouper.logits_chunk_size=abc", f"{MODEL}.use_fused_kernels=True", f"{key}=cutlass"]
    assert main(["doctor", *packed, *wrong]) == 1
    lines = capsys.readouterr().out.splitlines()
    (place,) = (i for i, line in enumerate(lines) if f"{key}=cutlass" in line)
    assert lines[place].startswith("  FAIL")
    assert lines[place + 1] == f"        fix: {key}=torch"
    assert any("++prefix_grouper.logits_chunk_size=abc: must be an integer >= 0" in line for line in lines)
    assert lines[-1] == "prefix sharing: not ready (2 problems)"


def test_warnings_exit_with_0_and_json_has_the_same_checks(capsys) -> None:
    warned, failed = Check(WARN, "a", "slow", "faster"), Check(FAIL, "b", "x" * 300, "y" * 300)
    assert doctor.show([("Title", [warned]), ("Empty", [])]) == 0
    assert capsys.readouterr().out == "Title\n  WARN  a  slow\n        fix: faster\nprefix sharing: ready\n"
    assert doctor.show([("Title", [Check(WARN, "mode", "rmpad", "flag=True")])]) == 0
    assert capsys.readouterr().out.endswith("\nprefix sharing: off; flag=True switches it on\n")
    assert doctor.show([("Title", [failed])]) == 1
    assert capsys.readouterr().out.splitlines()[1:3] == [f"  FAIL  b  {failed.text}", f"        fix: {failed.fix}"]
    assert doctor.show([("Title", [warned, failed])], as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ready"], report["problems"]) == (False, 1)
    assert report["checks"] == [{"section": "Title", **asdict(check)} for check in (warned, failed)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ACTOR}.strategy=[", "strategy=["),
        ("data.train_files=~/train.parquet", "for ~ write $HOME"),
        (f"{ACTOR}.clip_ratio=${{no.such.key}}", "no.such.key"),
        ("model_engine=no_such_engine", "no_such_engine"),
        ("prefix_grouper=null", "Config group override must be a string"),
        ("~critic", "this is no config of a PPO trainer"),
        (f"{ACTOR}.no_such_key=1", f"Could not override '{ACTOR}.no_such_key'"),
    ],
)
def test_wrong_overrides_are_one_line_errors(override: str, message: str) -> None:
    with pytest.raises(CommandError) as caught:
        compose_config([override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--json"]])
def test_help_and_doctor_are_fast_and_quiet(arguments: list[str]) -> None:
    """Two seconds of CPU: an import of verl or torch takes more."""
    command = [sys.executable, "-m", "verl_pg_plugin", *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    if "--json" in arguments:
        report = json.loads(done.stdout)
        assert report["ready"]
        texts = {(check["section"], check["what"]): check["text"] for check in report["checks"]}
        assert texts["Versions", "flash-attn"] in ("not installed (optional)", compat.installed("flash-attn"))
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_broken_or_replaced_plugins_are_reported(capsys, processes, monkeypatch) -> None:
    """verl logs this at DEBUG only and trains without sharing."""
    _, other, broken, rival = processes
    (line,) = bad(doctor.process_lines(broken))
    assert (line.what, line.fix) == ("plugin verl_pg_plugin", doctor.REGISTER_FIX)
    assert "import of verl_pg_plugin.engine.engine halted" in line.text
    line = line_of(bad(doctor.process_lines(rival)), "plugin verl_pg_plugin")
    assert "rival_plugin.Theirs is already registered as verl's language_model engine for ('cuda'" in line.text
    assert "VERL_USE_EXTERNAL_PLUGINS=verl_pg_plugin" in line.text
    lines = bad([Check(**engine) for engine in other["engines"]])
    assert [line.what for line in lines] == [f"{m}_model {s}" for m in ("language", "value") for s in ("fsdp", "fsdp2")]
    assert "unset VERL_ENGINE_DEVICE and VERL_ENGINE_VENDOR" in lines[0].text
    monkeypatch.setattr(doctor, "fresh_process", lambda: {**PROCESS})
    monkeypatch.setattr(doctor, "register", lambda: 1 / 0)
    assert main(["doctor", "--full"]) == 1
    assert "verl runs without it: ZeroDivisionError: division by zero" in capsys.readouterr().out
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    _, line = bad(doctor.process_lines({"error": "Unknown platform 'cpu'"}))
    assert "keeps verl from loading it" in line.text


def test_unsupported_versions_and_missing_names_are_reported(tmp_path: Path, monkeypatch) -> None:
    assert bad(doctor.version_lines()) == []
    old = tmp_path / "transformers-5.6.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.6.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = bad(doctor.version_lines())
    assert line.text.startswith("5.6.0 is outside the supported range")
    assert line.fix.startswith("pip install 'transformers")
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.99.0\n")
    (line,) = bad(doctor.version_lines())
    assert (line.status, line.fix) == (WARN, f"pip install '{compat.requirements('tested')['transformers']}'")
    monkeypatch.setattr(compat, "problems", lambda: ["torch 2.20: a.b is gone; needed for c; pip install 'torch<2.14'"])
    (line,) = bad(doctor.name_lines())
    assert (line.text, line.fix) == ("torch 2.20: a.b is gone; needed for c", "pip install 'torch<2.14'")


def test_missing_gpus_fail_unless_a_cluster_may_have_some(packed, processes, monkeypatch, capsys) -> None:
    assert bad(doctor.installed_lines()) == []
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    (line,) = bad(doctor.installed_lines())
    full = line_of(bad(doctor.process_lines(processes[3])), "GPU")
    assert (line.status, line.what, line.fix) == (full.status, full.what, full.fix) == (FAIL, "GPU", doctor.NO_GPU_FIX)
    assert overrides.selected_kernel("cuda") == [], "reported once"
    process = {**PROCESS, "platform": {**PLATFORM, "status": FAIL, "fix": doctor.NO_GPU_FIX}}
    monkeypatch.setattr(doctor, "fresh_process", lambda: process)
    assert main(["doctor", *packed, "ray_kwargs.ray_init.address=auto"]) == 0
    assert "WARN  platform" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "gpus", lambda: ["NVIDIA H200, 570.1, 9.0, 143771 MiB"])
    assert bad(doctor.installed_lines()) == []


def test_plugins_that_verl_does_not_load_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    for lines in (doctor.installed_lines(), doctor.process_lines(PROCESS)):
        (line,) = bad(lines)
        assert line.fix == "unset VERL_USE_EXTERNAL_PLUGINS, or add verl_pg_plugin to it"
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other, verl_pg_plugin")
    assert bad(doctor.installed_lines()) == []
    monkeypatch.setattr(doctor, "entry_points", lambda **_: ())
    assert "pip install <folder of this repository>" in bad(doctor.installed_lines())[0].fix
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_pg_plugin")
    assert bad(doctor.installed_lines()) == []


def test_hanging_or_killed_imports_of_verl_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SCRIPT", "print('noise'); print('{\"device\": \"cpu\"}')")
    assert doctor.fresh_process() == {"device": "cpu"}
    monkeypatch.setattr(doctor, "TIMEOUT_S", 1)
    for script, error in ("os.kill(os.getpid(), 9)", "ended with -9"), ("time.sleep(60)", "more than 1 s"):
        monkeypatch.setattr(doctor, "SCRIPT", f"import os, time; {script}")
        (line,) = bad(doctor.process_lines(doctor.fresh_process()))
        assert error in line.text


def test_mode_kernel_and_compilation_follow_the_overrides(packed: list[str]) -> None:
    lines = run_lines(compose_config(packed))
    assert (bad(lines), line_of(lines, "mode").text[:8]) == ([], "packed (")
    assert line_of(lines, "attention kernel").text.startswith("sdpa (")
    assert "no (++prefix_grouper.compile_layers=auto: compiling pays on a GPU" in line_of(lines, "compiled layers").text
    lines = run_lines(compose_config([*packed, "prefix_grouper.compile_layers=True"]))
    assert line_of(lines, "compiled layers").text.startswith("yes (")
    stock = run_lines(compose_config([*packed, f"{ACTOR}.use_prefix_grouper=False"]))
    (line,) = bad(stock)
    assert line.text.startswith("rmpad, which shares nothing (")
    assert (line.status, line.fix) == (WARN, f"{ACTOR}.use_prefix_grouper=True")
    assert {"attention kernel", "compiled layers"}.isdisjoint(check.what for check in stock)
    assert "which only model_engine=dp" in bad(run_lines(compose_config([*packed, "model_engine=megatron"])))[0].text


def test_configs_of_other_ppo_entry_points_are_read(packed, capsys, monkeypatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "fresh_process", lambda: PROCESS)
    folder = str(Path(verl.__file__).parent / "experimental/fully_async_policy/config")
    place = ["--config-path", folder, "--config-name", "fully_async_ppo_trainer"]
    assert main(["doctor", *place, *packed, "async_training.require_batches=2", "data.train_batch_size=0"]) == 0
    assert " packed (" in capsys.readouterr().out
    assert main(["doctor", *place[:2]]) == 2
    assert "--config-path and --config-name go together" in capsys.readouterr().err
    of_sft = [place[0], str(Path(verl.__file__).parent / "trainer/config"), place[2], "sft_trainer_engine"]
    assert main(["doctor", *of_sft]) == 2
    assert "sft_trainer_engine is no config of a PPO trainer" in capsys.readouterr().err
