"""Critics of every kind of checkpoint; test_exactness.py has their values and gradients."""

import shutil
from pathlib import Path

import pytest
from verl.utils import model as verl_model

from tests.engine.test_exactness import MIXED, PADDED
from tests.models.models import save_qwen3
from tests.support import (
    check_exact,
    clone,
    critic_batch,
    critic_loss,
    make_engine,
    save_tiny_model,
)
from verl_pg_plugin.cli.patch_model import patch

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("padded", [False, True])
def test_value_class_that_the_checkpoint_brings_along(value_model: str, tmp_path: Path, padded: bool) -> None:
    """``Qwen3ForValue`` reads a checkpoint of transformers' classifier."""
    patched = tmp_path / "patched"
    shutil.copytree(value_model, patched)
    patch(patched)
    engine = make_engine(str(patched), padded=padded, model={"trust_remote_code": True}, critic=True)
    assert any(base.__name__ == "Qwen3ForValue" for base in type(engine.module).__mro__)
    check_exact(engine, value_model, critic_batch(MIXED, **(PADDED if padded else {})))


def test_causal_lm_checkpoint_gets_a_new_head_that_learns(tmp_path: Path) -> None:
    """verl's critic usually starts from the actor's checkpoint."""
    engine = make_engine(save_qwen3(tmp_path), critic=True)
    batch, losses = critic_batch(MIXED), []
    for _ in range(4):
        with engine.train_mode():
            losses.append(sum(engine.train_batch(clone(batch), critic_loss())["loss"]))
    assert losses[-1] < losses[0]


def test_architecture_without_a_token_classifier_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "olmo2")
    with pytest.raises(ValueError, match=r"no token classifier for 'olmo2'.*critic\.model\.path"):
        make_engine(path, critic=True)


def test_mode_off_on_a_cpu_loads_and_gives_the_same_values(value_model: str) -> None:
    """verl alone asks for flash-attn, which no CPU has."""
    batch = critic_batch(MIXED[:3])
    off = make_engine(value_model, packed=False, critic=True)
    assert verl_model.load_valuehead_model.__module__ == "verl.utils.model", "verl's own loader is put back"
    check_exact(off, value_model, batch)
