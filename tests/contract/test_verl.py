"""The parts of verl, transformers and torch that we build on look as they did, and all of them are in the table."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from verl_pg_plugin.contract import torch as torch_contract
from verl_pg_plugin.contract import transformers as transformers_contract
from verl_pg_plugin.contract import verl as verl_contract
from verl_pg_plugin.contract.table import EXISTS, Part
from verl_pg_plugin.contract.verl import PARTS, changes

import verl_pg_plugin
from tests.contract.upstream_names import UPSTREAM, upstream_names

PACKAGE = Path(verl_pg_plugin.__file__).parent
ENGINE = "verl.workers.engine.fsdp.transformer_impl"
TABLE = {part.path: {user for other in PARTS if other.path == part.path for user in other.used_by} for part in PARTS}


def listed(path: str) -> Part:
    return next(part for part in PARTS if part.path == path)


def test_installed_verl_transformers_and_torch_are_what_our_code_was_written_for() -> None:
    assert changes() == []


def test_every_file_that_the_table_names_exists() -> None:
    missing = {user for users in TABLE.values() for user in users if not (PACKAGE / user).is_file()}
    assert not missing, "renamed or removed files are still in the table"


# What the table must list: every name that is imported, and every method that is overridden


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_table_lists_every_upstream_name_that_a_file_uses(file: Path) -> None:
    user = str(file.relative_to(PACKAGE))
    unlisted = {path for path in upstream_names(file.read_text()) if user not in TABLE.get(path, ())}
    assert not unlisted, f"add these to a table of contract/, with {user} as a user"


def test_names_are_found_in_functions_and_behind_modules() -> None:
    source = """
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
def late():
    import verl.utils.model as patched
    from verl.workers.engine.fsdp import transformer_impl
    transformer_impl.prepare_micro_batches = patched.load_valuehead_model
def bare():
    import transformers
    import verl.utils.ulysses
    verl.utils.ulysses.gather_outputs_and_unpad(transformers.AutoConfig)
tu.assign_non_tensor(patched.not_a_module)
def private():
    import torch
    from torch import nn
    from torch._dynamo import config as settings
    from torch.utils import _pytree
    settings.patch(_pytree.tree_leaves(torch._C._dynamo.eval_frame._set_lru_cache(nn.Module)))
"""
    assert upstream_names(source) == {
        "verl.utils.device.get_device_name",
        "verl.utils.model.load_valuehead_model",
        f"{ENGINE}.prepare_micro_batches",
        "verl.utils.tensordict_utils.assign_non_tensor",
        "verl.utils.ulysses.gather_outputs_and_unpad",
        "transformers.AutoConfig",
        "torch._dynamo.config.patch",
        "torch.utils._pytree.tree_leaves",
        "torch._C._dynamo.eval_frame._set_lru_cache",
    }


ACT_WHEN_IMPORTED = ("verl_pg_plugin.models.register_on_import",)


def our_classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(verl_pg_plugin.__path__, "verl_pg_plugin."):
        if module.name in ACT_WHEN_IMPORTED:
            continue
        try:
            found = importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in (
                "flash_attn",
                "flash_attn_interface",
                "triton",
            ):  # GPU kernels, no classes of verl's
                continue
            raise
        yield from (c for c in vars(found).values() if inspect.isclass(c) and c.__module__ == module.name)


WRITTEN_BY_DATACLASS = ("__init__", "__repr__", "__eq__")


def overridden_methods(cls: type) -> set[str]:
    """Methods of upstream classes that ours replace; not those that ``dataclass`` writes."""
    methods = set()
    for place, ours in enumerate(cls.__mro__):
        if not ours.__module__.startswith("verl_pg_plugin"):
            continue
        for name, member in vars(ours).items():
            if not inspect.isfunction(member) or (is_dataclass(ours) and name in WRITTEN_BY_DATACLASS):
                continue
            for theirs in cls.__mro__[place + 1 :]:
                if theirs.__module__.partition(".")[0] in UPSTREAM and name in vars(theirs):
                    methods.add(f"{theirs.__module__}.{theirs.__qualname__}.{name}")
                    break
    return methods


def test_the_table_lists_every_method_that_we_override() -> None:
    functions = {pkgutil.resolve_name(part.path) for part in PARTS if part.signature != EXISTS and not part.needs}
    overridden = set().union(*map(overridden_methods, our_classes()))
    assert f"{ENGINE}.FSDPEngine.forward_backward_batch" in overridden
    base_classes = ("transformers.modeling_utils.", "transformers.configuration_utils.")
    unlisted = {
        path
        for path in overridden
        if pkgutil.resolve_name(path) not in functions
        if not path.startswith(base_classes)  # constructors, which the classes of every model override
    }
    assert unlisted == set()


@pytest.mark.parametrize(
    "path",
    [
        "torch._C._dynamo.eval_frame._set_lru_cache",
        "torch.nn.attention.varlen.varlen_attn",
        *(f"{ENGINE}.{name}" for name in ("prepare_micro_batches", "postprocess_batch_func", "CPUOffloadPolicy")),
        "verl.utils.model.load_valuehead_model",
        *(f"{ENGINE}.FSDPEngine.{name}" for name in ("_build_module", "forward_backward_batch")),
        *(
            f"{ENGINE}.{engine}.{name}"
            for engine in ("FSDPEngineWithLMHead", "FSDPEngineWithValueHead")
            for name in ("prepare_model_inputs", "prepare_model_outputs", "forward_step")
        ),
    ],
)
def test_a_patched_or_overridden_part_that_disappears_is_reported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = pkgutil.resolve_name(path.rpartition(".")[0])
    name = path.rpartition(".")[2]
    for cls in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        if name in vars(cls):
            monkeypatch.delattr(cls, name)
    (message,) = {message for message in changes() if message.startswith(f"{path} ")}
    assert f"{path} is gone from {path.partition('.')[0]} " in message
    assert listed(path).used_by[0] in message


def test_the_tables_name_the_versions_that_the_tests_run_on() -> None:
    repository = PACKAGE.parent
    pinned = dict(
        line.split("==") for line in (repository / "constraints.txt").read_text().splitlines() if "==" in line
    )
    declared = [Requirement(line) for line in requires("verl-pg-plugin") or ()]
    lowest = {
        requirement.name: bound.version
        for requirement in declared
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    assert pinned["verl"] == verl_contract.VERL_VERSION
    assert f"{lowest['transformers']} to {pinned['transformers']}" == transformers_contract.TRANSFORMERS_VERSIONS
    highest_torch = pinned["torch"].rpartition(".")[0]
    assert f"{lowest['torch']} to {highest_torch}" == torch_contract.TORCH_VERSIONS
