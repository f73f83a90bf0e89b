"""The doctor's report of versions, parts of verl and attention kernels."""

from pathlib import Path

import pytest

from tests.cli.doctor.support import CPU_ONLY
from verl_pg_plugin.cli.doctor import environment

pytestmark = CPU_ONLY


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
    assert "'verl<0.10,>=0.9.0'" in problem.fix


def test_what_a_new_torch_has_taken_away_is_a_problem_that_names_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import exc

    monkeypatch.delattr(exc, "OperatorIssue")
    (problem,) = environment.parts().problems
    assert problem.what.startswith("torch._inductor.exc.OperatorIssue is gone from torch 2.")
    assert problem.what.endswith("needed by engine/compiled_layers.py")
    assert problem.fix == "pip install 'torch<2.14,>=2.11'"


def test_a_gpu_without_a_kernel_is_a_problem_and_no_gpu_is_not_two() -> None:
    (problem,) = environment.kernels("cuda", available=True).problems
    assert "flash_attn_2 needs flash-attn, which is not installed" in problem.what
    assert environment.kernels("cuda", available=False).problems == ()
