"""``python -m verl_pg_plugin patch-model`` on real folders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.models.models import random_ids
from tests.support import save_tiny_model
from verl_pg_plugin.__main__ import main
from verl_pg_plugin.cli.patch_model import BACKUP_FILE, MODELING_FILE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, "qwen3")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def run_python(script: str, folder: Path) -> None:
    """Run ``script`` in a new process inside ``folder``, which it gets as its argument."""
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, cwd=folder, env=env)


def rejected(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the command, which must fail with one line and change nothing."""
    before = contents(folder) if folder.is_dir() else None
    capsys.readouterr()
    assert main(["patch-model", str(folder), *options]) == 2
    assert before is None or contents(folder) == before
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_patched_checkpoint_loads_from_outside_the_repository_in_a_new_process(folder: Path) -> None:
    assert main(["patch-model", str(folder)]) == 0
    script = (
        "import sys, torch, transformers as t\n"
        "ids = torch.arange(12).view(2, 6)\n"
        "load = dict(trust_remote_code=True, dtype=torch.float32)\n"
        "model = t.AutoModelForCausalLM.from_pretrained(sys.argv[1], **load)\n"
        "value = t.AutoModelForTokenClassification.from_pretrained(sys.argv[1], **load)\n"
        "assert type(model).__name__ == 'Qwen3ForCausalLM' and 'transformers_modules' in type(model).__module__\n"
        "assert type(value).__name__ == 'Qwen3ForValue'\n"
        "stock = t.Qwen3ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n"
        "mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])\n"
        "got, want = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, stock))\n"
        "torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)\n"
        "model.save_pretrained(sys.argv[1] + '/saved')\n"
        "again = t.AutoModelForCausalLM.from_pretrained(sys.argv[1] + '/saved', **load)\n"
        "assert torch.equal(again(ids).logits, model(ids).logits)\n"
    )
    run_python(script, folder)


def test_patching_twice_changes_nothing_and_undo_restores_byte_for_byte(folder: Path) -> None:
    before = contents(folder)
    assert main(["patch-model", str(folder)]) == 0
    patched = contents(folder)
    assert json.loads(patched["config.json"])["auto_map"] == {
        "AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM",
        "AutoModelForTokenClassification": "modeling_qwen3.Qwen3ForValue",
    }
    assert main(["patch-model", str(folder)]) == 0
    assert contents(folder) == patched
    assert main(["patch-model", str(folder), "--undo"]) == 0
    assert contents(folder) == before


def test_an_old_modeling_file_is_brought_up_to_date(folder: Path) -> None:
    before = contents(folder)
    assert main(["patch-model", str(folder)]) == 0
    current = (folder / MODELING_FILE).read_bytes()
    (folder / MODELING_FILE).write_text("# of an older release\n")
    assert main(["patch-model", str(folder)]) == 0
    assert (folder / MODELING_FILE).read_bytes() == current
    assert main(["patch-model", str(folder), "--undo"]) == 0
    assert contents(folder) == before


def test_a_config_linked_from_a_download_cache_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (folder / "config.json").rename(blob)
    (folder / "config.json").symlink_to(blob)
    original = blob.read_bytes()
    assert main(["patch-model", str(folder)]) == 0
    assert blob.read_bytes() == original
    assert main(["patch-model", str(folder), "--undo"]) == 0
    assert (folder / "config.json").is_symlink()
    assert (folder / "config.json").read_bytes() == original


def test_other_auto_map_entries_are_kept(folder: Path) -> None:
    edit_config(folder, auto_map={"AutoTokenizer": ["mine.Tokenizer", None]})
    assert main(["patch-model", str(folder)]) == 0
    assert json.loads((folder / "config.json").read_text())["auto_map"]["AutoTokenizer"] == ["mine.Tokenizer", None]


def test_an_auto_map_that_points_elsewhere_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(folder, auto_map={"AutoModelForCausalLM": "mine.Model"})
    assert "already points to mine.Model" in rejected(folder, capsys)


def test_a_modeling_file_of_the_users_own_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / MODELING_FILE).write_text("# mine\n")
    assert "was not put there by patch-model" in rejected(folder, capsys)


def test_another_architecture_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path, "llama")
    assert "model_type is 'llama'" in rejected(tmp_path, capsys)


def test_a_folder_that_is_no_checkpoint_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in rejected(tmp_path, capsys)
    assert "does not exist" in rejected(tmp_path / "nowhere", capsys)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in rejected(tmp_path, capsys)


def test_undo_refuses_what_it_could_not_restore(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "was not patched" in rejected(folder, capsys, "--undo")
    assert main(["patch-model", str(folder)]) == 0
    edit_config(folder, rope_theta=5.0)
    assert "was edited after patch-model" in rejected(folder, capsys, "--undo")
    assert (folder / BACKUP_FILE).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to drop privileges")
@pytest.mark.parametrize("option", [[], ["--undo"]])
def test_a_read_only_folder_is_rejected(folder: Path, option: list[str]) -> None:
    if option:
        assert main(["patch-model", str(folder)]) == 0
    before = contents(folder)
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(0o555 if parent == folder else 0o755)
    process = os.fork()
    if process == 0:
        # root may write everywhere; an ordinary user may not
        if os.getuid() == 0:
            os.setuid(65534)
        os._exit(main(["patch-model", str(folder), *option]))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 2
    assert contents(folder) == before
    folder.chmod(0o755)


def test_register_builds_the_classes_without_copying_a_file(folder: Path) -> None:
    script = (
        "import sys, transformers as t\n"
        "import verl_pg_plugin.models.register_on_import\n"
        "verl_pg_plugin.models.register()\n"
        "causal = t.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "value = t.AutoModelForTokenClassification.from_pretrained(sys.argv[1])\n"
        "assert type(causal).__module__ == 'verl_pg_plugin.models.qwen3.modeling_qwen3', type(causal)\n"
        "assert type(value).__name__ == 'Qwen3ForValue', type(value)\n"
    )
    before = contents(folder)
    run_python(script, folder)
    assert contents(folder) == before


def test_tied_embeddings_load_with_both_heads(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=True)
    assert main(["patch-model", str(tmp_path)]) == 0
    causal = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert causal.lm_head.weight is causal.model.embed_tokens.weight
    value = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, trust_remote_code=True)
    ids = random_ids(2, 5)
    assert value(ids, attention_mask=torch.ones_like(ids)).logits.shape == (2, 5, 1)
