"""``python -m verl_pg_plugin doctor``: what it finds, how it says so, and its exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import save_tiny_model
from verl_pg_plugin.__main__ import main
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.cli.command import CommandError
from verl_pg_plugin.cli.doctor import engines, environment
from verl_pg_plugin.cli.doctor.overrides import compose_config, settings
from verl_pg_plugin.cli.doctor.report import Problem, Section, show
from verl_pg_plugin.cli.doctor.sharing import Group, Limit, flop_bound, sharing, sharing_model
from verl_pg_plugin.layout import build_packed_layout, build_prefix_order

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="asserts what the CPU default reports")

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Complete but for the tokenizer's content, which no validator reads."""
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(path)
    (path / "tokenizer.json").write_text("{}")
    return str(path)


@pytest.fixture
def packed(checkpoint: str) -> list[str]:
    """Overrides that leave nothing to object to."""
    return [
        f"actor_rollout_ref.model.path={checkpoint}",
        "actor_rollout_ref.model.use_remove_padding=True",
        f"{ACTOR}.use_prefix_grouper=True",
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.name=hf",
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=1024",
        "data.max_response_length=256",
        "trainer.device=cpu",
    ]


def run_main(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str, str]:
    code = main(["doctor", *overrides])
    output = capsys.readouterr()
    return code, output.out, output.err


# The command


def test_a_healthy_machine_is_all_fine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(capsys)
    assert code == 0, out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[-1] == "all fine"
    assert f"torch {torch.__version__} supported: >=2.11" in lines
    assert "plugin verl_pg_plugin loads" in lines
    assert "language_model fsdp2 PrefixGrouperFSDPEngineWithLMHead ours (device cpu, vendor cpu)" in lines
    assert "auto takes sdpa (prefix_grouper.attention_kernel=auto on device cpu)" in lines
    assert "With these overrides" not in lines


def test_every_problem_has_its_fix_and_the_exit_code_is_1(
    capsys: pytest.CaptureFixture[str], packed: list[str]
) -> None:
    code, out, _ = run_main(capsys, *packed, f"{ACTOR}.qat.enable=True", "prefix_grouper.attention_kernel=flash_attn_2")
    assert code == 1
    assert "2 problems" in out
    assert f"{ACTOR}.qat.enable=True" in out
    assert f"   fix: {ACTOR}.qat.enable=False" in out.splitlines()
    assert "   fix: prefix_grouper.attention_kernel=auto" in out.splitlines()


def test_a_wrong_override_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_main(capsys, f"{ACTOR}.no_such_key=1")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: Could not override '{ACTOR}.no_such_key'. To append to your config")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ACTOR}.strategy=[", "strategy=["),
        (f"{ACTOR}.clip_ratio=${{no.such.key}}", "no.such.key"),
        ("model_engine=no_such_engine", "no_such_engine"),
    ],
    ids=["parse", "interpolation", "group"],
)
def test_every_kind_of_wrong_override_is_one_line(override: str, message: str) -> None:
    with pytest.raises(CommandError) as caught:
        compose_config([override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_warnings_alone_leave_the_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    warning = Section("Title", (("key", "value"),), (Problem("slow", "faster", is_warning=True),))
    assert show([warning]) == 0
    assert show([warning, Section("Other", (), (Problem("x" * 300, "y" * 300),))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "1. " + "x" * 300 in lines, "a line that is wrapped cannot be copied"
    assert "   fix: " + "y" * 300 in lines


# The command where the package, or verl, cannot be set up


def run_module(*overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "verl_pg_plugin", "doctor", *overrides],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


ENGINE_IS_GONE = "import sys; sys.modules['verl_pg_plugin.engine.fsdp_engine'] = None"
OTHER_HOLDS_OUR_KEY = """
from verl.workers.engine.base import BaseEngine, EngineRegistry

@EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")
class OtherEngine(BaseEngine):
    pass
"""


@pytest.mark.parametrize(
    ("startup", "plugin", "platform", "cause", "fix"),
    [
        (
            ENGINE_IS_GONE,
            "",
            "cpu",
            "engines, and verl goes on without: ModuleNotFoundError: import of",
            "correct what",
        ),
        ("", OTHER_HOLDS_OUR_KEY, "nvidia", "broken_plugin.OtherEngine is already registered", "correct what it names"),
        (
            "import sys; sys.modules['verl'] = None",
            "",
            "cpu",
            "import verl fails: ModuleNotFoundError",
            "correct what it names",
        ),
        ("", "", "no_such", "import verl fails: ValueError: Unknown platform 'no_such'", "unset VERL_PLATFORM"),
    ],
    ids=["engine", "registry", "verl", "platform"],
)
def test_what_keeps_the_package_from_registering_is_reported_by_the_command(
    startup: str, plugin: str, platform: str, cause: str, fix: str, tmp_path: Path
) -> None:
    broken_plugin(tmp_path, plugin)
    (tmp_path / "sitecustomize.py").write_text(startup)
    result = run_module(f"{ROLLOUT}.n=4", PYTHONPATH=str(tmp_path), VERL_PLATFORM=platform)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stdout.splitlines()
    (number,) = (number for number, line in enumerate(lines) if line[:1].isdigit() and cause in line)
    assert lines[number + 1].startswith(f"   fix: {fix}")


# This machine


def broken_plugin(folder: Path, code: str) -> None:
    """An installed plugin of verl's whose module runs ``code`` when it is loaded."""
    metadata = folder / "broken_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nbroken_plugin = broken_plugin\n")
    (folder / "broken_plugin.py").write_text(code)


def test_what_verl_swallows_when_a_plugin_does_not_load_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_plugin(tmp_path, "import no_such_package\n")
    # Python runs this module when it starts: ours now fails in the fresh process, as with a half-removed package.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['verl_pg_plugin.engine.fsdp_engine'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    process = engines.fresh_process()
    assert not process.loads
    no_device, *problems = engines.plugins(process).problems
    assert "finds no cuda device" in no_device.what
    ours, other = sorted(problems, key=lambda problem: problem.is_warning)
    assert "import of verl_pg_plugin.engine.fsdp_engine halted" in ours.what
    assert "No module named 'no_such_package'" in other.what
    assert (ours.is_warning, other.is_warning) == (False, True)
    built = {row[2] for row in engines.engines(process).rows}
    assert built == {"FSDPEngineWithLMHead", "FSDPEngineWithValueHead"}
    assert engines.engines(process).problems == (), "the broken plugin is the problem"


def test_environment_variables_that_put_another_engine_in_force_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "npu")
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    (problem,) = engines.engines(engines.fresh_process()).problems
    assert "language_model/fsdp2" in problem.what
    assert "device npu" in problem.what
    assert problem.fix == "unset VERL_ENGINE_DEVICE"


def test_a_plugin_that_verl_was_told_not_to_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other_plugin")
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    process = engines.fresh_process()
    excluded = engines.plugins(process).problems[-1]
    assert excluded.what == "VERL_USE_EXTERNAL_PLUGINS=other_plugin keeps verl from loading verl_pg_plugin"
    assert "unset VERL_USE_EXTERNAL_PLUGINS" in excluded.fix
    assert engines.engines(process).problems == ()


def test_verl_that_cannot_be_imported_is_a_problem_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "no_such_platform")
    process = engines.fresh_process()
    (problem,) = engines.plugins(process).problems
    assert problem.what.startswith("import verl fails: ValueError: Unknown platform 'no_such_platform'")


def test_a_plugin_without_entry_point_is_named() -> None:
    process = engines.FreshProcess(platform="CPUPlatform", device="cpu", vendor="cpu", available=True)
    (problem,) = engines.plugins(process).problems
    assert "pip install --no-build-isolation --editable" in problem.fix


def test_packages_outside_the_supported_range_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.versions().problems == ()
    old = tmp_path / "transformers-5.6.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.6.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = environment.versions().problems
    assert problem.what.startswith("transformers 5.6.0 is outside the supported range")
    assert problem.fix.startswith("pip install 'transformers")


def test_a_changed_part_of_verl_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine.fsdp import transformer_impl

    assert environment.parts().problems == ()
    monkeypatch.delattr(transformer_impl, "prepare_micro_batches")
    (problem,) = environment.parts().problems
    assert "prepare_micro_batches is gone from verl" in problem.what
    assert "'verl<0.10,>=0.9.1'" in problem.fix


@pytest.mark.parametrize(
    ("script", "error"),
    [("import os; os.kill(os.getpid(), 9)", "ended with -9"), ("import time; time.sleep(60)", "more than 2 s")],
    ids=["killed", "hanging"],
)
def test_an_import_of_verl_that_never_returns_is_a_problem(
    script: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(engines, "SCRIPT", tmp_path / "script.py")
    monkeypatch.setattr(engines, "TIMEOUT_S", 2)
    (problem,) = engines.plugins(engines.fresh_process()).problems
    assert error in problem.what


def test_a_gpu_without_a_kernel_is_a_problem_and_no_gpu_is_not_two() -> None:
    (problem,) = environment.kernels("cuda", available=True).problems
    assert "flash_attn_2 needs flash-attn, which is not installed" in problem.what
    assert environment.kernels("cuda", available=False).problems == ()


# Overrides


def test_modes_and_kernel_follow_the_overrides(packed: list[str]) -> None:
    section = settings(compose_config(packed))
    rows = {row[0]: row[1] for row in section.rows}
    assert section.problems == ()
    assert rows["mode"].startswith("packed (")
    assert rows["attention kernel"].startswith("sdpa (")
    stock = settings(compose_config([*packed, f"{ACTOR}.use_prefix_grouper=False"]))
    rows = {row[0]: row[1] for row in stock.rows}
    assert rows["mode"].startswith("rmpad (")
    assert "attention kernel" not in rows


def test_what_verl_itself_rejects_is_a_problem(packed: list[str]) -> None:
    (problem,) = settings(compose_config([*packed, f"{ACTOR}.loss_agg_mode=no-such-mode"])).problems
    assert problem.what.startswith("verl rejects it:")
    assert "no-such-mode" in problem.what
    rows = dict(settings(compose_config([*packed, f"{ACTOR}.loss_agg_mode=no-such-mode"])).rows)
    assert rows["verl's own checks"] == "reject it"
    assert dict(settings(compose_config(packed)).rows)["verl's own checks"] == "passed"


def test_a_budget_that_holds_a_group_is_no_warning(packed: list[str]) -> None:
    section = sharing(compose_config(packed))
    rows = {row[0]: row[1] for row in section.rows}
    assert section.problems == ()
    assert rows["its tokens"] == "2047 instead of 5120, 2.50x fewer"
    assert rows[f"{ACTOR}.ppo_max_token_len_per_gpu"] == "8192 tokens per GPU: holds a whole group"


def test_a_budget_smaller_than_a_group_is_a_warning_with_the_number_that_holds_it(packed: list[str]) -> None:
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu"
    (warning,) = sharing(compose_config([*packed, f"{budget}=1600"])).problems
    assert warning.is_warning
    assert "cut in up to 2 parts" in warning.what
    assert warning.fix.startswith(f"{budget}=2047 {ROLLOUT}.log_prob_max_token_len_per_gpu=2047 ")
    fixed = sharing(compose_config([*packed, *warning.fix.removesuffix(" (if the memory holds it)").split()]))
    assert fixed.problems == ()


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.n=four",
        f"{ROLLOUT}.n=0",
        "data.max_response_length=abc",
        f"{ACTOR}.ppo_max_token_len_per_gpu=8k",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=-1",
        f"{ACTOR}.ulysses_sequence_parallel_size=0",
    ],
)
def test_a_count_that_is_none_is_a_problem_and_no_traceback(packed: list[str], override: str) -> None:
    problems = sharing(compose_config([*packed, override])).problems
    assert f"{override} is not a positive integer" in [problem.what for problem in problems]
    assert not any(problem.is_warning for problem in problems)


def test_the_reference_policy_has_a_budget_only_where_there_is_one(packed: list[str]) -> None:
    def keys(*overrides: str) -> set[str]:
        return {row[0] for row in sharing(compose_config([*packed, *overrides])).rows}

    assert keys(f"{ACTOR}.use_kl_loss=True") - keys() == {f"{REF}.log_prob_max_token_len_per_gpu"}


def test_a_budget_smaller_than_a_sequence_is_a_problem(packed: list[str]) -> None:
    (problem,) = sharing(compose_config([*packed, f"{ACTOR}.ppo_max_token_len_per_gpu=1200"])).problems
    assert not problem.is_warning
    assert "the longest sequence, 1279 rows, does not fit" in problem.what


def test_fixed_micro_batches_that_cut_groups_are_a_warning(packed: list[str]) -> None:
    fixed = [f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"]
    (warning,) = sharing(compose_config([*packed, *fixed])).problems
    assert warning.fix.startswith(f"{ACTOR}.ppo_micro_batch_size_per_gpu=4 ")


def test_modes_that_share_nothing_have_no_budget_to_warn_of(packed: list[str]) -> None:
    section = sharing(compose_config([*packed, f"{ACTOR}.use_prefix_grouper=False", f"{ROLLOUT}.n=64"]))
    assert section.problems == ()
    assert section.rows[-1][0] == "in force"


# The estimate is what the engine does


def real_group(group: Group) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(10, 90, group.prompt)
    rows = [np.concatenate([prompt, [i], rng.integers(10, 90, group.response - 1)]) for i in range(group.n)]
    return np.concatenate(rows), np.arange(group.n + 1) * (group.prompt + group.response)


@pytest.mark.parametrize("group", [Group(prompt=7, response=3, n=4), Group(1, 1, 1), Group(5, 9, 1), Group(12, 2, 9)])
def test_rows_of_a_group_are_those_of_its_layout(group: Group) -> None:
    tokens, offsets = real_group(group)
    assert build_packed_layout(tokens, offsets, np.full(group.n, group.prompt)).num_rows == group.num_rows


@pytest.mark.parametrize("value", [9, 12, 14, 15, 18, 30])
@pytest.mark.parametrize("sp_size", [1, 2])
def test_parts_of_a_group_are_those_that_the_engine_cuts(value: int, sp_size: int) -> None:
    group = Group(prompt=7, response=3, n=5)
    limit = Limit("key", value, counts_rows=True, sp_size=sp_size)
    tokens, offsets = real_group(group)
    parts = cut_micro_batches(build_prefix_order(tokens, offsets), MicroBatchLimits(max_rows=value * sp_size))
    assert limit.parts(group) == len(parts)
    assert Limit("key", 8, counts_rows=True).parts(group) == 0


@pytest.mark.parametrize(
    "key", [f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"]
)
def test_ranks_that_share_a_sequence_multiply_the_budget_whichever_key_sets_them(packed: list[str], key: str) -> None:
    rows = {row[0]: row[1] for row in sharing(compose_config([*packed, f"{key}=2"])).rows}
    shared = "8192 tokens per GPU, shared by 2 GPUs: holds a whole group"
    assert rows[f"{ACTOR}.ppo_max_token_len_per_gpu"] == shared


def test_flop_bound_needs_a_checkpoint_and_grows_with_the_group(packed: list[str]) -> None:
    config = compose_config(packed)
    bounds = [flop_bound(sharing_model(config), Group(prompt=512, response=16, n=n)) for n in (1, 2, 8)]
    assert 1.0 < bounds[0] < 1.1, "with nothing shared, the head alone runs on fewer tokens"
    assert bounds[0] < bounds[1] < 2.1 < bounds[2] < 8.0
    wide = compose_config([*packed, "+actor_rollout_ref.model.override_config.intermediate_size=4096"])
    assert flop_bound(sharing_model(wide), Group(prompt=512, response=16, n=8)) != bounds[2], "the override counts"
    config.actor_rollout_ref.model.path = "Qwen/Qwen3-4B"
    assert sharing_model(config) is None


def test_a_head_that_is_not_cut_in_chunks_is_a_remark(packed: list[str], tmp_path: Path) -> None:
    def remark(*overrides: str) -> str | None:
        section = sharing(compose_config([*packed, *overrides]))
        assert section.problems == ()
        return dict(section.rows).get("prefix_grouper.logits_chunk_size")

    olmo = f"actor_rollout_ref.model.path={save_tiny_model(tmp_path, 'olmo2')}"
    assert remark() is None
    assert "logits of all response rows are held at once (model type olmo2" in (remark(olmo) or "")
    assert remark(olmo, "prefix_grouper.logits_chunk_size=0") is None
    assert remark(olmo, f"{ACTOR}.use_prefix_grouper=False") is None
