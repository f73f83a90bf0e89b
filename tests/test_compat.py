"""The installed verl, transformers and torch are what our code overrides; changes are reported by name."""

import ast
import inspect
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_5 import modeling_qwen3_5
from verl.utils import distributed

from tests.fresh import run_fresh
from verl_pg_plugin import compat, register, upstream
from verl_pg_plugin.cli import OK, Check, doctor
from verl_pg_plugin.engine import engine as engine_module
from verl_pg_plugin.engine.engine import SharedPrefixEngine, SharedPrefixLanguageModel, SharedPrefixValueModel
from verl_pg_plugin.engine.registration import StockValueModelOnCPU

VEOMNI = Path(sys.prefix, "veomni")

register()


def test_installed_versions_pass_and_untested_ones_are_named(tmp_path: Path, monkeypatch) -> None:
    assert compat.problems() == []
    for name, version in (("verl", "0.10.0"), ("torch", "2.99.0+cpu"), ("transformers", "5.9.0")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    versions = [line.partition(" is outside")[0] for line in compat.untested()]
    assert versions == ["verl 0.10.0", "torch 2.99.0+cpu"]


def _renamed(self, hidden_states, position_embeddings, attention_mask=None, kv=None, **kwargs): ...


CHECKPOINTS = next(name for name in ("__init_subclass__", "__call__") if name in vars(GradientCheckpointingLayer))


@pytest.mark.parametrize(
    ("owner", "name", "new", "message"),
    [
        (modeling_llama.LlamaDecoderLayer, "forward", _renamed, "without past_key_values|cache"),
        (
            modeling_qwen3_5.Qwen3_5GatedDeltaNet,
            "forward",
            _renamed,
            "does not use causal_conv1d_fn, chunk_gated_delta_rule|torch_chunk_gated_delta_rule",
        ),
        (GradientCheckpointingLayer, CHECKPOINTS, None, "is gone or inherited"),
    ],
    ids=["as in transformers 5.24", "as in transformers 5.15", "as in transformers 5.23"],
)
def test_changes_like_those_of_past_transformers_are_reported(monkeypatch, owner, name, new, message) -> None:
    if new is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, new)
    (problem,) = compat.problems()
    assert message in problem
    assert owner.__name__ in problem
    assert "pip install 'transformers" in problem


def test_replaced_functions_must_have_the_known_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (lambda backend, timeout_second: None, lambda timeout_second, backend, more=0: None):
        defaults = now.__defaults__
        monkeypatch.setattr(distributed, "initialize_global_process_group_ray", now)
        with pytest.raises(upstream.UpstreamChangedError, match=r"not exactly \(timeout_second, backend\)"):
            upstream.use_single_gloo_backend()
        assert now.__defaults__ == defaults


def overridden(engine_cls: type) -> set[str]:
    """Return verl's methods that an engine of ours overrides."""
    bases = engine_cls.__mro__
    ours = {name for cls in bases if cls.__module__.startswith("verl_pg_plugin") for name in vars(cls)}
    verls = [cls for cls in reversed(bases) if cls.__module__.startswith("verl.")]
    last = {name: (cls, vars(cls)[name]) for cls in verls for name in ours & vars(cls).keys()}
    return {f"{cls.__module__}.{cls.__name__}.{name}" for name, (cls, it) in last.items() if inspect.isfunction(it)}


@pytest.mark.parametrize("engine_cls", [SharedPrefixLanguageModel, SharedPrefixValueModel, StockValueModelOnCPU])
def test_every_overridden_method_is_checked(engine_cls: type) -> None:
    assert overridden(engine_cls)
    assert overridden(engine_cls) <= compat.SIGNATURES.keys()


def test_attributes_read_from_verls_engine_are_declared_and_checked() -> None:
    own = inspect.get_annotations(SharedPrefixEngine).keys() - vars(SharedPrefixEngine).keys()
    of_engine = (names for path, names in compat._NAMES_WITHIN.items() if ".FSDPEngine." in path)
    assert own == {name for names in of_engine for name in names.split()}
    nodes = ast.walk(ast.parse(inspect.getsource(engine_module)))
    read = {it.attr for it in nodes if isinstance(it, ast.Attribute) and ast.unparse(it.value) == "self"}
    assert own <= read


ON_VEOMNI = """
import json
from tests.test_compat import compat, overridden
from verl_pg_plugin.engine.veomni import SharedPrefixVeOmniLanguageModel

print(json.dumps([compat.problems(), sorted(overridden(SharedPrefixVeOmniLanguageModel))]))
"""


@pytest.mark.skipif(not VEOMNI.is_dir(), reason="needs the package veomni, see scripts/install.sh")
def test_veomni_engine_is_checked_where_it_is_installed() -> None:
    code = f"import sys\nsys.path.append({str(VEOMNI)!r})\n{doctor.SCRIPT}{ON_VEOMNI}"
    (ended,) = run_fresh([(code, {"VERL_PLATFORM": "cpu"})])
    *_, process, last = ended.stdout.splitlines()
    engine = Check(OK, "language_model veomni", "PrefixGrouperVeOmniEngineWithLMHead")
    assert json.loads(process)["engines"][-1] == asdict(engine)
    problems, methods = json.loads(last)
    assert problems == []
    assert set(methods) <= compat.SIGNATURES.keys()
